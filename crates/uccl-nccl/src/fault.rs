//! Errors, as the results that NCCL knows.

use uccl_device::Error as DeviceError;
use uccl_flow::{ErrorClass, FlowError};
use uccl_nccl_abi::NcclResult;

use crate::rma_error::RmaError;

/// Why a call of NCCL's fails.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    /// A flow, a listener or their process.
    #[error(transparent)]
    Flow(#[from] FlowError),
    /// A one-sided call.
    #[error(transparent)]
    Rma(#[from] RmaError),
    /// The machine's interfaces.
    #[error("the network interfaces cannot be read: {0}")]
    Interfaces(#[from] DeviceError),
    /// No interface is left to use.
    #[error("{0}")]
    NoInterface(String),
    /// A variable that cannot be understood.
    #[error("{name}={value}: {reason}")]
    Variable { name: &'static str, value: String, reason: String },
    /// A call that the interface does not allow.
    #[error("NCCL's call of {0} is against the interface: {1}")]
    Misuse(&'static str, &'static str),
}

impl Fault {
    pub(crate) fn result(&self) -> NcclResult {
        match self {
            Self::Flow(error) => match error.class() {
                ErrorClass::System => NcclResult::SYSTEM_ERROR,
                ErrorClass::Misuse => NcclResult::INTERNAL_ERROR,
                ErrorClass::Sizes => NcclResult::INVALID_USAGE,
                ErrorClass::Remote => NcclResult::REMOTE_ERROR,
            },
            Self::Rma(error) => error.result(),
            Self::Interfaces(_) => NcclResult::SYSTEM_ERROR,
            Self::NoInterface(_) | Self::Variable { .. } => NcclResult::INVALID_USAGE,
            Self::Misuse(..) => NcclResult::INTERNAL_ERROR,
        }
    }
}
