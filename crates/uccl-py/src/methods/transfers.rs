//! Transfers: those with a table's signature in pairs, and the calls on their ids.

use pyo3::{exceptions::PyRuntimeError, prelude::*};
use uccl_p2p::{Error, Op, Status, TransferId};

use super::{Args, Kwargs, wait_timeout};
use crate::{
    call, descs,
    endpoint::PyEndpoint,
    error,
    interrupt::waiting,
    ipc,
    prepared::{self, PyPreparedTransfer},
    signatures, stream,
};

/// Two methods for each kind of transfer: one that runs it to its end, and one that starts it.
macro_rules! transfers {
    ($(
        $doc:literal
        $run:ident $run_signature:ident, $post:ident $post_signature:ident
            = $module:ident::$read:ident($op:ident);
    )+) => {
        #[pymethods]
        impl PyEndpoint {
            $(
                #[doc = signature!($run_signature)]
                #[doc = concat!($doc, ".")]
                #[pyo3(signature = (*args, **kwargs), text_signature = None)]
                fn $run(
                    &self,
                    py: Python<'_>,
                    args: Args<'_, '_>,
                    kwargs: Option<Kwargs<'_, '_>>,
                ) -> PyResult<bool> {
                    let signature = &signatures::$run_signature;
                    $module::run(self, py, $module::$read(self, Op::$op, signature, args, kwargs))
                }

                #[doc = signature!($post_signature)]
                #[doc = concat!($doc, ", without waiting: `(ok, transfer_id)`.")]
                #[pyo3(signature = (*args, **kwargs), text_signature = None)]
                fn $post(
                    &self,
                    py: Python<'_>,
                    args: Args<'_, '_>,
                    kwargs: Option<Kwargs<'_, '_>>,
                ) -> PyResult<(bool, u64)> {
                    let signature = &signatures::$post_signature;
                    $module::post(self, py, $module::$read(self, Op::$op, signature, args, kwargs))
                }
            )+
        }
    };
}

transfers! {
    "Sends memory to the peer's matching receive"
    send SEND, send_async SEND_ASYNC = call::scalar_two_sided(Send);

    "Receives at most `size` bytes from the peer's matching send"
    recv RECV, recv_async RECV_ASYNC = call::scalar_two_sided(Recv);

    "Sends many pieces of memory as one message"
    sendv SENDV, sendv_async SENDV_ASYNC = call::vector_two_sided(Send);

    "Receives one message of many pieces"
    recvv RECVV, recvv_async RECVV_ASYNC = call::vector_two_sided(Recv);

    "Reads the peer's advertised memory into local memory"
    read READ, read_async READ_ASYNC = call::scalar_one_sided(Read);

    "Writes local memory to the peer's advertised memory"
    write WRITE, write_async WRITE_ASYNC = call::scalar_one_sided(Write);

    "Reads many pieces as one transfer"
    readv READV, readv_async READV_ASYNC = call::vector_one_sided(Read);

    "Writes many pieces as one transfer"
    writev WRITEV, writev_async WRITEV_ASYNC = call::vector_one_sided(Write);

    "Sends memory, registered or not, to the peer's matching receive"
    send_ipc SEND_IPC, send_ipc_async SEND_IPC_ASYNC = ipc::scalar_two_sided(Send);

    "Receives at most `size` bytes into memory, registered or not"
    recv_ipc RECV_IPC, recv_ipc_async RECV_IPC_ASYNC = ipc::scalar_two_sided(Recv);

    "Reads memory that `advertise_ipc` of the peer named"
    read_ipc READ_IPC, read_ipc_async READ_IPC_ASYNC = ipc::scalar_one_sided(Read);

    "Writes memory that `advertise_ipc` of the peer named"
    write_ipc WRITE_IPC, write_ipc_async WRITE_IPC_ASYNC = ipc::scalar_one_sided(Write);

    "Reads many pieces that `advertisev_ipc` of the peer named"
    readv_ipc READV_IPC, readv_ipc_async READV_IPC_ASYNC = ipc::vector_one_sided(Read);

    "Writes many pieces that `advertisev_ipc` of the peer named"
    writev_ipc WRITEV_IPC, writev_ipc_async WRITEV_IPC_ASYNC = ipc::vector_one_sided(Write);
}

#[pymethods]
impl PyEndpoint {
    #[doc = signature!(TRANSFER)]
    /// Starts a `"read"` or `"write"` between descriptors: `(ok, transfer_id)`.
    #[pyo3(signature = (*args, **kwargs), text_signature = None)]
    fn transfer(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, u64)> {
        call::post(self, py, descs::transfer(self, args, kwargs))
    }

    #[doc = signature!(PREPARE)]
    /// Checks a `"read"` or `"write"` of many pieces once, for any number of posts: `(ok,
    /// prepared)`, and then `prepared.post(conn_id)`. No byte moves, and no connection is needed.
    #[pyo3(signature = (*args, **kwargs), text_signature = None)]
    fn prepare(
        &self,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, Option<PyPreparedTransfer>)> {
        prepared::prepare(self, args, kwargs)
    }

    /// The state of a transfer: `(True, False)` in flight, `(True, True)` done, `(False, True)`
    /// failed.
    fn poll_async(&self, py: Python<'_>, transfer_id: u64) -> (bool, bool) {
        let transfer = TransferId(transfer_id);
        self.state(py, transfer, self.core.poll(transfer))
    }

    /// Whether a transfer has ended, for UCCL's callers of `transfer` that ask by this name.
    /// `xfer_handle` is the result of `transfer`, an `XferHandle`, or a transfer's id. Raises
    /// `RuntimeError` with the reason if the transfer failed or was not started.
    fn check_xfer_state(&self, py: Python<'_>, xfer_handle: &Bound<'_, PyAny>) -> PyResult<bool> {
        let transfer_id = descs::transfer_of(xfer_handle)?;
        match self.poll_async(py, transfer_id) {
            (true, has_ended) => Ok(has_ended),
            (false, _) => {
                let reason = self.transfer_error(transfer_id).or_else(error::last);
                Err(PyRuntimeError::new_err(reason.unwrap_or_default()))
            }
        }
    }

    /// Waits for a transfer's end: the result of `poll_async`, or `(True, False)` if `timeout`
    /// seconds pass first.
    #[pyo3(signature = (transfer_id, timeout=None))]
    fn wait(
        &self,
        py: Python<'_>,
        transfer_id: u64,
        timeout: Option<f64>,
    ) -> PyResult<(bool, bool)> {
        let transfer = TransferId(transfer_id);
        let timeout = wait_timeout(timeout)?;
        match waiting(py, &self.core, |core, interrupt| core.wait(transfer, timeout, interrupt))? {
            Err(Error::Timeout(_)) => Ok((true, false)),
            status => Ok(self.state(py, transfer, status)),
        }
    }

    /// Has later work on a CUDA stream wait until the transfer has ended, without a wait of the
    /// caller: `True`, or `False` with `last_error()`. If `CUDA_DEVICE_MAX_CONNECTIONS` is below 8,
    /// the call itself waits for a transfer that is staged through host memory.
    fn stream_wait(
        &self,
        py: Python<'_>,
        transfer_id: u64,
        stream: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let stream = stream::of(&self.core, stream)?;
        let core = &self.core;
        // The call may wait for memory that is being returned to the driver.
        Ok(error::ok(py.detach(|| core.hold_stream(TransferId(transfer_id), stream))))
    }

    /// Ends a transfer. When this returns True, no byte of it lands in either side's memory any
    /// more; `transfer_error` tells whether it had finished before.
    pub(super) fn cancel(&self, py: Python<'_>, transfer_id: u64) -> bool {
        let transfer = TransferId(transfer_id);
        let core = &self.core;
        let cancelled = py.detach(|| core.cancel(transfer));
        error::ok(cancelled.and_then(|_| ipc::ended(self, py, transfer)))
    }

    /// The reason why a transfer failed; None if it has not.
    fn transfer_error(&self, transfer_id: u64) -> Option<String> {
        match self.core.poll(TransferId(transfer_id)) {
            Ok(Status::Failed(e)) | Err(e) => Some(e.to_string()),
            Ok(Status::Pending | Status::Done(_)) => None,
        }
    }

    /// The number of bytes that a finished transfer moved (for a receive: received); None unless it
    /// has succeeded.
    fn transfer_bytes(&self, transfer_id: u64) -> Option<u64> {
        match self.core.poll(TransferId(transfer_id)) {
            Ok(Status::Done(outcome)) => Some(outcome.bytes),
            _ => None,
        }
    }
}

impl PyEndpoint {
    /// `(ok, is_done)` of a transfer's state.
    pub(super) fn state(
        &self,
        py: Python<'_>,
        transfer: TransferId,
        status: Result<Status, Error>,
    ) -> (bool, bool) {
        let is_pending = matches!(status, Ok(Status::Pending));
        let answer = error::state(status);
        if is_pending {
            return answer;
        }
        match ipc::ended(self, py, transfer) {
            Ok(()) => answer,
            Err(e) => error::refuse(e, (false, true)),
        }
    }
}
