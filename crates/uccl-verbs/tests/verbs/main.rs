//! Channels over the RDMA devices of the machine, for example soft-RoCE in a guest.
//!
//! Tests of faults cut cables and are for a network that loses nothing else: soft-RoCE now and then
//! forgets a read that was refused if the refusal is lost. The others hold with packets lost as
//! well.

mod conformance;
mod devices;
mod faults;
mod hostile;
mod registration;
mod sleep;
mod support;
mod transfers;
