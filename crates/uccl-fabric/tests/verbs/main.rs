//! Channels over real RDMA devices: whatever is there, soft-RoCE in a guest for one.

mod devices;
mod faults;
mod hostile;
mod registration;
mod sleep;
mod support;
mod transfers;
