//! Which of the two sides a side is.

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    Lead,
    Serve,
}
