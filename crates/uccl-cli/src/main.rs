//! The `uccl` command.
fn main() {}
