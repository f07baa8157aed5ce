//! Signals and notifications.

use pyo3::{prelude::*, types::PyBytes};
use uccl_p2p::{ConnId, TransferId, Until};

use super::wait_timeout;
use crate::{
    args, buffer,
    endpoint::PyEndpoint,
    error::{self, CallError, settle},
    interrupt::waiting,
    signal::SignalWord,
    stream,
};

#[pymethods]
impl PyEndpoint {
    /// Waits until a word of eight bytes, which peers' signals change, is `value` or more, or with
    /// `equals` is `value`: `(ok, value)`. `ok` is `False` if `timeout` seconds pass before, the
    /// connection `conn_id` is lost before, or there is no such word.
    #[pyo3(signature = (ptr, value, mr_id=None, *, equals=false, timeout=None, conn_id=None))]
    #[expect(clippy::too_many_arguments, reason = "they have names in Python")]
    fn wait_signal(
        &self,
        py: Python<'_>,
        ptr: &Bound<'_, PyAny>,
        value: u64,
        mr_id: Option<u64>,
        equals: bool,
        timeout: Option<f64>,
        conn_id: Option<u64>,
    ) -> PyResult<(bool, u64)> {
        let timeout = timeout.map(args::seconds).transpose()?;
        let until = if equals { Until::Equals(value) } else { Until::AtLeast(value) };
        let waited = SignalWord::of(&self.core, ptr, mr_id).and_then(|word| {
            let value = word.wait(&self.core, py, conn_id.map(ConnId), until, timeout)?;
            value.ok_or_else(|| CallError::refuse("the word was not that in time"))
        });
        settle(waited.map(|value| (true, value)), (false, 0))
    }

    /// Has later work on a CUDA stream wait until a word of eight bytes, in a GPU's memory or in
    /// pinned host memory, has reached `value`: `True`, or `False` with `last_error()`. With
    /// `conn_id` the stream also goes on when that connection is lost or the time is over: read the
    /// word to know.
    #[pyo3(signature = (stream, ptr, value, mr_id=None, *, conn_id=None))]
    fn stream_wait_signal(
        &self,
        stream: &Bound<'_, PyAny>,
        ptr: &Bound<'_, PyAny>,
        value: u64,
        mr_id: Option<u64>,
        conn_id: Option<u64>,
    ) -> PyResult<bool> {
        let stream = stream::of(&self.core, stream)?;
        let held = SignalWord::of(&self.core, ptr, mr_id).and_then(|SignalWord { mr, ptr }| {
            match conn_id.map(ConnId) {
                Some(conn) => {
                    let word = (mr, ptr);
                    self.core.hold_stream_for_word_from(conn, stream, word, value)?;
                }
                None => self.core.hold_stream_for_word(stream, mr, ptr, value)?,
            }
            Ok(())
        });
        settle(held.map(|()| true), false)
    }

    /// Sends a message to the peer and waits until it is delivered.
    #[pyo3(signature = (conn_id, payload, *, timeout=None))]
    fn send_notif(
        &self,
        py: Python<'_>,
        conn_id: u64,
        payload: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<bool> {
        let (ok, transfer) = self.send_notif_async(py, conn_id, payload, timeout)?;
        if !ok {
            return Ok(false);
        }
        let transfer = TransferId(transfer);
        match waiting(py, &self.core, |core, interrupt| core.wait(transfer, None, interrupt)) {
            Ok(status) => Ok(self.state(py, transfer, status) == (true, true)),
            Err(interrupted) => {
                self.cancel(py, transfer.0);
                Err(interrupted)
            }
        }
    }

    /// Sends a message to the peer: `(ok, transfer_id)`.
    #[pyo3(signature = (conn_id, payload, *, timeout=None))]
    fn send_notif_async(
        &self,
        py: Python<'_>,
        conn_id: u64,
        payload: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<(bool, u64)> {
        let payload = buffer::payload(payload)?;
        let timeout = timeout.map(args::seconds).transpose()?;
        let core = &self.core;
        let sent = py.detach(|| core.send_notif(ConnId(conn_id), payload, timeout));
        Ok(error::or_refuse(sent.map(|transfer| (true, transfer.0)), (false, 0)))
    }

    /// Takes the messages that have arrived: `[(conn_id, bytes)]`, in order per connection.
    fn get_notifs<'py>(&self, py: Python<'py>) -> Vec<(u64, Bound<'py, PyBytes>)> {
        notifs(py, error::or_refuse(self.core.take_notifs(), Vec::new()))
    }

    /// Waits until messages are there or `timeout` seconds have passed, and takes them. With
    /// `conn_id` the wait also ends when that connection is lost, once all messages have been
    /// taken; `last_error()` then tells that from the end of the time. Either way the messages of
    /// all connections are taken.
    #[pyo3(signature = (timeout=None, *, conn_id=None))]
    fn wait_notifs<'py>(
        &self,
        py: Python<'py>,
        timeout: Option<f64>,
        conn_id: Option<u64>,
    ) -> PyResult<Vec<(u64, Bound<'py, PyBytes>)>> {
        let timeout = wait_timeout(timeout)?;
        let conn = conn_id.map(ConnId);
        let arrived = waiting(py, &self.core, |core, interrupt| match conn {
            Some(conn) => core.wait_notifs_from(conn, timeout, interrupt),
            None => core.wait_notifs(timeout, interrupt),
        })?;
        let arrived = match arrived {
            Ok(arrived) if arrived.is_empty() && conn.is_some() => {
                error::refuse("no message came in time", arrived)
            }
            arrived => error::or_refuse(arrived, Vec::new()),
        };
        Ok(notifs(py, arrived))
    }
}

fn notifs(py: Python<'_>, arrived: Vec<uccl_p2p::Notification>) -> Vec<(u64, Bound<'_, PyBytes>)> {
    arrived.into_iter().map(|n| (n.conn.0, PyBytes::new(py, &n.payload))).collect()
}
