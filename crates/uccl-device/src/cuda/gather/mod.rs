//! One launch that copies any number of pieces: gather, scatter, or both.
//!
//! The kernels are `kernels/copy.cu`. The host cuts the work into shares of about equal cost, one
//! for each warp (partition.rs), and writes the tables where the GPU reads them (launcher.rs).

mod flag;
mod launcher;
#[cfg(test)]
mod model;
mod params;
mod partition;
mod table;
mod table_places;

pub use flag::Flag;
pub(crate) use launcher::load_kernels;
pub use launcher::{Completion, Launch, LaunchOptions, Launcher, LauncherConfig, Tables};
pub use params::{Piece, WordChange, kernel_header, layout_assertions};
pub use table::DeviceTable;
