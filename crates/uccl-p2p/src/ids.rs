//! The names callers hold: connections, regions and transfers.
//!
//! Each carries a generation, so a name that outlived its object is refused, never mistaken.

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($what, " {}"), self.0)
            }
        }
    };
}

id!(
    /// Names a connection of one endpoint.
    ConnId,
    "connection"
);
id!(
    /// Names a registered memory region of one endpoint.
    MrId,
    "region"
);
id!(
    /// Names a transfer of one endpoint.
    TransferId,
    "transfer"
);
