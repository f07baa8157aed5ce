//! The ids that callers hold: of connections, regions and transfers.
//!
//! Each contains a generation, so an id that outlives its object is refused and never taken for
//! another object's.

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
    /// The id of a connection of one endpoint.
    ConnId,
    "connection"
);
id!(
    /// The id of a registered memory region of one endpoint.
    MrId,
    "region"
);
id!(
    /// The id of a transfer of one endpoint.
    TransferId,
    "transfer"
);
