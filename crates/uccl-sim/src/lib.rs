//! Networks in virtual time, for the algorithms of [`uccl_tran`].
//!
//! A [`Scenario`] has the network, the pattern of its traffic, and its faults. A
//! [`Simulation`] runs it packet by packet, with a [`MultipathSender`] and a [`MultipathReceiver`]
//! for each flow, and gives a [`Report`]. There is no clock and no thread: the same scenario with
//! the same seed gives the same report.
//!
//! ```text
//!   host            its port     leaf                 spine          leaf          host
//!   sender next() --> [queue] --> [queue] x spines --> [queue] ... --> [queue] --> receiver
//!          on_ack() <------------------ acknowledgements, first in every queue ---- poll_ack()
//! ```
//!
//! ```
//! use uccl_sim::{Pattern, Scenario, Simulation};
//!
//! let scenario = Scenario { pattern: Pattern::Incast { senders: 4 }, ..Scenario::default() };
//! let report = Simulation::named(&scenario, "recycled", "time", "delay-ecn")?.run(|_| ());
//! assert_eq!(report.completions, 4);
//! # Ok::<(), uccl_sim::ScenarioError>(())
//! ```
//!
//! [`MultipathSender`]: uccl_tran::multipath::MultipathSender
//! [`MultipathReceiver`]: uccl_tran::multipath::MultipathReceiver
#![forbid(unsafe_code)]

mod background;
mod event_queue;
mod faults;
mod host;
mod pattern;
mod port;
mod report;
mod scenario;
mod simulation;
mod topology;

pub use event_queue::EventQueue;
pub use faults::{Bursts, Flaps, LinkFaults, ReorderFault};
pub use pattern::{FlowPlan, Pattern};
pub use report::{Completions, Drops, GroupReport, Report, percentile};
pub use scenario::{Scenario, ScenarioError};
pub use simulation::{FlowContext, Progress, Simulation};
pub use topology::{Links, Topology};
