//! `Endpoint`'s methods: each is a line or two over the module that implements it.

use std::time::Duration;

use pyo3::{
    IntoPyObjectExt,
    exceptions::PyRuntimeError,
    prelude::*,
    types::{PyBytes, PyDict, PyTuple},
};
use uccl_p2p::{ConnId, Endpoint, Error, Op, Status, TransferId, Until};
use uccl_wire::metadata::{Device, Metadata};

use crate::{
    advertise, advertise_ipc,
    advertised::Advertised,
    args, buffer, call, config, descs,
    endpoint::PyEndpoint,
    error::{self, Stop, settle},
    implicit::Implicit,
    interrupt::waiting,
    ipc,
    peers::{self, Peers},
    regions::Regions,
    registration,
    reuse::{Reuse, region_of},
    shared::PySharedMemory,
    signal::Word,
    stream,
};

impl PyEndpoint {
    /// `(ok, is_done)` of a transfer's state.
    fn state(
        &self,
        py: Python<'_>,
        transfer: TransferId,
        status: Result<Status, Error>,
    ) -> (bool, bool) {
        let answer = match status {
            Ok(Status::Pending) => return (true, false),
            Ok(Status::Done(_)) => (true, true),
            Ok(Status::Failed(e)) | Err(e) => error::refuse(e, (false, true)),
        };
        match ipc::ended(self, py, transfer) {
            Ok(()) => answer,
            Err(e) => error::refuse(e, (false, true)),
        }
    }
}

type Args<'a, 'py> = &'a Bound<'py, PyTuple>;
type Kwargs<'a, 'py> = &'a Bound<'py, PyDict>;
static SEND: args::Signature<7> = call::two_sided("send");
static SEND_ASYNC: args::Signature<7> = call::two_sided("send_async");
static RECV: args::Signature<7> = call::two_sided("recv");
static RECV_ASYNC: args::Signature<7> = call::two_sided("recv_async");
static SENDV: args::Signature<8> = call::two_sided_v("sendv");
static SENDV_ASYNC: args::Signature<8> = call::two_sided_v("sendv_async");
static RECVV: args::Signature<8> = call::two_sided_v("recvv");
static RECVV_ASYNC: args::Signature<8> = call::two_sided_v("recvv_async");
static READ: args::Signature<8> = call::one_sided("read");
static READ_ASYNC: args::Signature<8> = call::one_sided("read_async");
static WRITE: args::Signature<11> = call::write("write");
static WRITE_ASYNC: args::Signature<11> = call::write("write_async");
static READV: args::Signature<9> = call::one_sided_v("readv");
static READV_ASYNC: args::Signature<9> = call::one_sided_v("readv_async");
static WRITEV: args::Signature<12> = call::write_v("writev");
static WRITEV_ASYNC: args::Signature<12> = call::write_v("writev_async");
static SEND_IPC: args::Signature<6> = ipc::two_sided("send_ipc");
static SEND_IPC_ASYNC: args::Signature<6> = ipc::two_sided("send_ipc_async");
static RECV_IPC: args::Signature<6> = ipc::two_sided("recv_ipc");
static RECV_IPC_ASYNC: args::Signature<6> = ipc::two_sided("recv_ipc_async");
static READ_IPC: args::Signature<7> = ipc::one_sided("read_ipc");
static READ_IPC_ASYNC: args::Signature<7> = ipc::one_sided("read_ipc_async");
static WRITE_IPC: args::Signature<7> = ipc::one_sided("write_ipc");
static WRITE_IPC_ASYNC: args::Signature<7> = ipc::one_sided("write_ipc_async");
static READV_IPC: args::Signature<8> = ipc::one_sided_v("readv_ipc");
static READV_IPC_ASYNC: args::Signature<8> = ipc::one_sided_v("readv_ipc_async");
static WRITEV_IPC: args::Signature<8> = ipc::one_sided_v("writev_ipc");
static WRITEV_IPC_ASYNC: args::Signature<8> = ipc::one_sided_v("writev_ipc_async");

#[pymethods]
impl PyEndpoint {
    #[new]
    #[pyo3(signature = (*args, **kwargs), text_signature = "(local_gpu_idx=None, num_cpus=None, *, psk=None, bind=None, port=None, base_port=None, timeout=None, transfer_timeout=None, transport=None, tcp_streams=None, tcp_congestion=None, checksum=None, cma=None, ipc=None, spin_us=None, numa_affinity=None)")]
    fn new(py: Python<'_>, args: Args<'_, '_>, kwargs: Option<Kwargs<'_, '_>>) -> PyResult<Self> {
        let config = config::config(args, kwargs)?;
        let core = py.detach(|| Endpoint::new(config)).map_err(|e| error::exception(&e))?;
        Ok(Self {
            core,
            regions: Regions::default(),
            reuse: Reuse::default(),
            peers: Peers::default(),
            implicit: Implicit::default(),
            advertised: Advertised::default(),
        })
    }

    /// Connects to the endpoint that listens at an address: `(ok, conn_id)`.
    ///
    /// The addresses of a name are tried in order, all within `timeout`. Without a port, the call
    /// uses the GPU's well-known port, and waits within `timeout` for an endpoint that does not
    /// listen yet. At a given port an endpoint must listen already.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, remote_ip_addr, remote_gpu_idx=None, remote_port=None, *, timeout=None)")]
    fn connect(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, u64)> {
        settle(peers::connect(&self.core, py, args, kwargs).map(|conn| (true, conn)), (false, 0))
    }

    /// Connects to the endpoint of a GPU of this host, and waits within `timeout` until it listens:
    /// `(ok, conn_id)`.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, remote_gpu_idx, *, timeout=None)")]
    fn connect_local(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, u64)> {
        settle(
            peers::connect_local(&self.core, py, args, kwargs).map(|conn| (true, conn)),
            (false, 0),
        )
    }

    /// Waits for a peer to connect: `(ok, ip, gpu_idx, conn_id)`.
    #[pyo3(signature = (*, timeout=None))]
    fn accept(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<(bool, String, i64, u64)> {
        let timeout = timeout.map(args::seconds).transpose()?;
        let accepted = self
            .peers
            .accept(&self.core, py, timeout)
            .map(|a| (true, a.ip.to_string(), i64::from(a.gpu_index), a.conn.0));
        settle(accepted, (false, String::new(), -1, 0))
    }

    /// Waits for a peer of this host to connect: `(ok, gpu_idx, conn_id)`.
    #[pyo3(signature = (*, timeout=None))]
    fn accept_local(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<(bool, i64, u64)> {
        let timeout = timeout.map(args::seconds).transpose()?;
        let accepted = self
            .peers
            .accept_local(&self.core, py, timeout)
            .map(|a| (true, i64::from(a.gpu_index), a.conn.0));
        settle(accepted, (false, -1, 0))
    }

    /// Accepts connections in the background from now on; accept will not return them.
    fn start_passive_accept(&self) -> bool {
        error::ok(self.core.start_passive_accept())
    }

    /// Connects to the peer with this metadata, once: `(ok, conn_id)`. A lost connection is
    /// replaced by one to the endpoint that listens there now.
    fn add_remote_endpoint(
        &self,
        py: Python<'_>,
        metadata_bytes: &Bound<'_, PyAny>,
    ) -> PyResult<(bool, u64)> {
        let metadata = buffer::bytes(metadata_bytes)?;
        settle(self.peers.add(&self.core, py, &metadata).map(|conn| (true, conn)), (false, 0))
    }

    /// Closes a connection; its unfinished transfers fail.
    fn remove_remote_endpoint(&self, py: Python<'_>, conn_id: u64) -> bool {
        let removed = self.peers.remove(&self.core, py, ConnId(conn_id));
        let let_go = advertise_ipc::disconnected(self, py, ConnId(conn_id));
        error::ok(removed.and(let_go))
    }

    /// The address of this endpoint, for `add_remote_endpoint` of its peers.
    fn get_metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes =
            self.core.metadata().encode().map_err(|e| PyRuntimeError::new_err(e.to_string()))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// `(ip, port, gpu)` of metadata; the GPU is an index or a PCI address, as in the metadata.
    #[staticmethod]
    fn parse_metadata<'py>(
        py: Python<'py>,
        metadata: &Bound<'py, PyAny>,
    ) -> PyResult<(String, u16, Bound<'py, PyAny>)> {
        let metadata = Metadata::decode(&buffer::bytes(metadata)?)
            .map_err(|e| PyRuntimeError::new_err(e.to_string()))?;
        let gpu = match metadata.device {
            Device::Gpu(index) => index.into_bound_py_any(py)?,
            Device::Bdf(bdf) => bdf.into_bound_py_any(py)?,
        };
        Ok((metadata.ip.to_string(), metadata.port, gpu))
    }

    /// Registers memory: `(ok, mr_id)`.
    ///
    /// Memory given by its address must stay allocated until `dereg`; an object is kept until then.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, ptr, size=None, floatType=None)")]
    fn reg(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, u64)> {
        settle(registration::reg(self, py, args, kwargs).map(|mr| (true, mr)), (false, 0))
    }

    /// Registers many pieces of memory, all or none: `(ok, [mr_id])`.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, ptrs, sizes=None)")]
    fn regv(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, Vec<u64>)> {
        settle(
            registration::regv(self, py, args, kwargs).map(|mrs| (true, mrs)),
            (false, Vec::new()),
        )
    }

    /// Ends a region: no access of a peer lands in it any more. If a peer may still touch it, this
    /// fails, the memory has to stay allocated, and the same call waits once more. A region that
    /// several tensors of `register_memory` share ends with the last of their `mr_id`s.
    fn dereg(&self, py: Python<'_>, mr_id: u64) -> bool {
        error::ok(registration::remove(self, py, mr_id))
    }

    /// Registers tensors, all or none, and describes them.
    ///
    /// A tensor that lies in an earlier one shares its region: the keys are equal, each has an
    /// `mr_id` of its own, and each needs a `deregister_memory`.
    fn register_memory(
        &self,
        py: Python<'_>,
        tensor_list: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<descs::PyXferDesc>> {
        raising(descs::register(self, py, tensor_list))
    }

    /// Ends the regions of descriptors, each with the last descriptor that shares it.
    fn deregister_memory(&self, py: Python<'_>, desc_list: &Bound<'_, PyAny>) -> PyResult<()> {
        settle(descs::deregister(self, py, desc_list), ())
    }

    /// The bytes of descriptors, for a peer's `deserialize_descs`.
    fn get_serialized_descs<'py>(
        &self,
        py: Python<'py>,
        desc_list: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &descs::serialize(desc_list)?))
    }

    /// The descriptors in a peer's `get_serialized_descs`.
    fn deserialize_descs(
        &self,
        serialized_bytes: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<descs::PyXferDesc>> {
        descs::deserialize(&buffer::bytes(serialized_bytes)?)
    }

    /// Starts a `"read"` or `"write"` between descriptors: `(ok, transfer_id)`.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, op_name, local_desc_list, remote_desc_list, *, notif=None, timeout=None, stream=None)")]
    fn transfer(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, u64)> {
        self.post(py, descs::transfer(self, args, kwargs))
    }

    /// Makes an advert, with which a peer can read and write memory of a region: `(ok, bytes)`, or
    /// `ok` with `out_buf`.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, mr_id, ptr, size, out_buf=None)")]
    fn advertise<'py>(
        &self,
        py: Python<'py>,
        args: Args<'_, 'py>,
        kwargs: Option<Kwargs<'_, 'py>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        advertise::advertise(self, py, args, kwargs)
    }

    /// Makes adverts, with which a peer can read and write many pieces of memory: `(ok, [bytes])`,
    /// or `ok` with `out_buf_list`: a buffer for each, or one of 64 bytes times the number of
    /// pieces.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, mr_id_v, ptr_v, size_v, out_buf_list=None, num_iovs=None)")]
    fn advertisev<'py>(
        &self,
        py: Python<'py>,
        args: Args<'_, 'py>,
        kwargs: Option<Kwargs<'_, 'py>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        advertise::advertisev(self, py, args, kwargs)
    }

    /// Makes the info with which a peer of this host can read and write memory: `(ok, info)`.
    ///
    /// An object is advertised until its end, or until the end of the object that it is a view of.
    /// An object without weak references, such as a `bytearray`, is kept until the connection is
    /// removed, or until the first advertisement after the connection was lost. Memory given by its
    /// address must stay allocated for the same time.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, ptr, size=None)")]
    fn advertise_ipc<'py>(
        slf: &Bound<'py, Self>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, Bound<'py, PyBytes>)> {
        let info = advertise_ipc::advertise(slf, args, kwargs)?;
        Ok((info.is_some(), PyBytes::new(slf.py(), info.as_deref().unwrap_or_default())))
    }

    /// Makes infos with which a peer of this host can access many pieces of memory: `(ok, [info])`.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, ptr_v, size_v=None)")]
    fn advertisev_ipc<'py>(
        slf: &Bound<'py, Self>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, Vec<Bound<'py, PyBytes>>)> {
        let (py, infos) = (slf.py(), advertise_ipc::advertisev(slf, args, kwargs)?);
        let ok = infos.is_some();
        let infos = infos.unwrap_or_default();
        Ok((ok, infos.iter().map(|info| PyBytes::new(py, info)).collect()))
    }

    /// Sends memory to the peer's matching receive.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, mr_id, ptr, size=None, *, notif=None, timeout=None, stream=None)")]
    fn send(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<bool> {
        self.run(py, call::scalar_two_sided(self, Op::Send, &SEND, args, kwargs))
    }

    /// Sends memory to the peer's matching receive, without waiting: `(ok, transfer_id)`.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, mr_id, ptr, size=None, *, notif=None, timeout=None, stream=None)")]
    fn send_async(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, u64)> {
        self.post(py, call::scalar_two_sided(self, Op::Send, &SEND_ASYNC, args, kwargs))
    }

    /// Receives at most `size` bytes from the peer's matching send.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, mr_id, ptr, size=None, *, timeout=None, stream=None)")]
    fn recv(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<bool> {
        self.run(py, call::scalar_two_sided(self, Op::Recv, &RECV, args, kwargs))
    }

    /// Receives at most `size` bytes from the peer's matching send, without waiting: `(ok, transfer_id)`.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, mr_id, ptr, size=None, *, timeout=None, stream=None)")]
    fn recv_async(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, u64)> {
        self.post(py, call::scalar_two_sided(self, Op::Recv, &RECV_ASYNC, args, kwargs))
    }

    /// Sends many pieces of memory as one message.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, mr_id_v, ptr_v, size_v=None, num_iovs=None, *, notif=None, timeout=None, stream=None)")]
    fn sendv(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<bool> {
        self.run(py, call::vector_two_sided(self, Op::Send, &SENDV, args, kwargs))
    }

    /// Sends many pieces of memory as one message, without waiting: `(ok, transfer_id)`.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, mr_id_v, ptr_v, size_v=None, num_iovs=None, *, notif=None, timeout=None, stream=None)")]
    fn sendv_async(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, u64)> {
        self.post(py, call::vector_two_sided(self, Op::Send, &SENDV_ASYNC, args, kwargs))
    }

    /// Receives one message of many pieces.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, mr_id_v, ptr_v, size_v=None, num_iovs=None, *, timeout=None, stream=None)")]
    fn recvv(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<bool> {
        self.run(py, call::vector_two_sided(self, Op::Recv, &RECVV, args, kwargs))
    }

    /// Receives one message of many pieces, without waiting: `(ok, transfer_id)`.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, mr_id_v, ptr_v, size_v=None, num_iovs=None, *, timeout=None, stream=None)")]
    fn recvv_async(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, u64)> {
        self.post(py, call::vector_two_sided(self, Op::Recv, &RECVV_ASYNC, args, kwargs))
    }

    /// Reads the peer's advertised memory into local memory.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, mr_id, ptr, size, meta, *, notif=None, timeout=None, stream=None)")]
    fn read(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<bool> {
        self.run(py, call::scalar_one_sided(self, Op::Read, &READ, args, kwargs))
    }

    /// Reads the peer's advertised memory into local memory, without waiting: `(ok, transfer_id)`.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, mr_id, ptr, size, meta, *, notif=None, timeout=None, stream=None)")]
    fn read_async(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, u64)> {
        self.post(py, call::scalar_one_sided(self, Op::Read, &READ_ASYNC, args, kwargs))
    }

    /// Writes local memory to the peer's advertised memory.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, mr_id, ptr, size, meta, *, notif=None, timeout=None, stream=None, signal=None, strong=False, context=0)")]
    fn write(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<bool> {
        self.run(py, call::scalar_one_sided(self, Op::Write, &WRITE, args, kwargs))
    }

    /// Writes local memory to the peer's advertised memory, without waiting: `(ok, transfer_id)`.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, mr_id, ptr, size, meta, *, notif=None, timeout=None, stream=None, signal=None, strong=False, context=0)")]
    fn write_async(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, u64)> {
        self.post(py, call::scalar_one_sided(self, Op::Write, &WRITE_ASYNC, args, kwargs))
    }

    /// Reads many pieces as one transfer.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, mr_id_v, ptr_v, size_v, meta_v, num_iovs=None, *, notif=None, timeout=None, stream=None)")]
    fn readv(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<bool> {
        self.run(py, call::vector_one_sided(self, Op::Read, &READV, args, kwargs))
    }

    /// Reads many pieces as one transfer, without waiting: `(ok, transfer_id)`.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, mr_id_v, ptr_v, size_v, meta_v, num_iovs=None, *, notif=None, timeout=None, stream=None)")]
    fn readv_async(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, u64)> {
        self.post(py, call::vector_one_sided(self, Op::Read, &READV_ASYNC, args, kwargs))
    }

    /// Writes many pieces as one transfer.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, mr_id_v, ptr_v, size_v, meta_v, num_iovs=None, *, notif=None, timeout=None, stream=None, signal=None, strong=False, context=0)")]
    fn writev(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<bool> {
        self.run(py, call::vector_one_sided(self, Op::Write, &WRITEV, args, kwargs))
    }

    /// Writes many pieces as one transfer, without waiting: `(ok, transfer_id)`.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, mr_id_v, ptr_v, size_v, meta_v, num_iovs=None, *, notif=None, timeout=None, stream=None, signal=None, strong=False, context=0)")]
    fn writev_async(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, u64)> {
        self.post(py, call::vector_one_sided(self, Op::Write, &WRITEV_ASYNC, args, kwargs))
    }

    /// Sends memory, registered or not, to the peer's matching receive.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, ptr, size=None, *, notif=None, timeout=None, stream=None)")]
    fn send_ipc(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<bool> {
        ipc::run(self, py, ipc::scalar_two_sided(self, Op::Send, &SEND_IPC, args, kwargs))
    }

    /// Sends memory, registered or not, to the peer's matching receive, without waiting: `(ok, transfer_id)`.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, ptr, size=None, *, notif=None, timeout=None, stream=None)")]
    fn send_ipc_async(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, u64)> {
        ipc::post(self, py, ipc::scalar_two_sided(self, Op::Send, &SEND_IPC_ASYNC, args, kwargs))
    }

    /// Receives at most `size` bytes into memory, registered or not.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, ptr, size=None, *, timeout=None, stream=None)")]
    fn recv_ipc(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<bool> {
        ipc::run(self, py, ipc::scalar_two_sided(self, Op::Recv, &RECV_IPC, args, kwargs))
    }

    /// Receives at most `size` bytes into memory, registered or not, without waiting: `(ok, transfer_id)`.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, ptr, size=None, *, timeout=None, stream=None)")]
    fn recv_ipc_async(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, u64)> {
        ipc::post(self, py, ipc::scalar_two_sided(self, Op::Recv, &RECV_IPC_ASYNC, args, kwargs))
    }

    /// Reads memory that `advertise_ipc` of the peer named.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, ptr, size, info, *, notif=None, timeout=None, stream=None)")]
    fn read_ipc(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<bool> {
        ipc::run(self, py, ipc::scalar_one_sided(self, Op::Read, &READ_IPC, args, kwargs))
    }

    /// Reads memory that `advertise_ipc` of the peer named, without waiting: `(ok, transfer_id)`.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, ptr, size, info, *, notif=None, timeout=None, stream=None)")]
    fn read_ipc_async(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, u64)> {
        ipc::post(self, py, ipc::scalar_one_sided(self, Op::Read, &READ_IPC_ASYNC, args, kwargs))
    }

    /// Writes memory that `advertise_ipc` of the peer named.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, ptr, size, info, *, notif=None, timeout=None, stream=None)")]
    fn write_ipc(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<bool> {
        ipc::run(self, py, ipc::scalar_one_sided(self, Op::Write, &WRITE_IPC, args, kwargs))
    }

    /// Writes memory that `advertise_ipc` of the peer named, without waiting: `(ok, transfer_id)`.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, ptr, size, info, *, notif=None, timeout=None, stream=None)")]
    fn write_ipc_async(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, u64)> {
        ipc::post(self, py, ipc::scalar_one_sided(self, Op::Write, &WRITE_IPC_ASYNC, args, kwargs))
    }

    /// Reads many pieces that `advertisev_ipc` of the peer named.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, ptr_v, size_v, info_v, num_iovs=None, *, notif=None, timeout=None, stream=None)")]
    fn readv_ipc(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<bool> {
        ipc::run(self, py, ipc::vector_one_sided(self, Op::Read, &READV_IPC, args, kwargs))
    }

    /// Reads many pieces that `advertisev_ipc` of the peer named, without waiting: `(ok, transfer_id)`.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, ptr_v, size_v, info_v, num_iovs=None, *, notif=None, timeout=None, stream=None)")]
    fn readv_ipc_async(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, u64)> {
        ipc::post(self, py, ipc::vector_one_sided(self, Op::Read, &READV_IPC_ASYNC, args, kwargs))
    }

    /// Writes many pieces that `advertisev_ipc` of the peer named.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, ptr_v, size_v, info_v, num_iovs=None, *, notif=None, timeout=None, stream=None)")]
    fn writev_ipc(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<bool> {
        ipc::run(self, py, ipc::vector_one_sided(self, Op::Write, &WRITEV_IPC, args, kwargs))
    }

    /// Writes many pieces that `advertisev_ipc` of the peer named, without waiting: `(ok, transfer_id)`.
    #[pyo3(signature = (*args, **kwargs), text_signature = "($self, conn_id, ptr_v, size_v, info_v, num_iovs=None, *, notif=None, timeout=None, stream=None)")]
    fn writev_ipc_async(
        &self,
        py: Python<'_>,
        args: Args<'_, '_>,
        kwargs: Option<Kwargs<'_, '_>>,
    ) -> PyResult<(bool, u64)> {
        ipc::post(self, py, ipc::vector_one_sided(self, Op::Write, &WRITEV_IPC_ASYNC, args, kwargs))
    }

    /// The state of a transfer: `(True, False)` in flight, `(True, True)` done, `(False, True)`
    /// failed.
    fn poll_async(&self, py: Python<'_>, transfer_id: u64) -> (bool, bool) {
        let transfer = TransferId(transfer_id);
        self.state(py, transfer, self.core.poll(transfer))
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

    /// Waits until a word of eight bytes, which peers' signals change, is `value` or more, or with `equals` is `value`:
    /// `(ok, value)`. `ok` is `False` if `timeout` seconds pass before, the connection `conn_id` is lost before, or there
    /// is no such word.
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
        let waited = Word::of(&self.core, ptr, mr_id).and_then(|word| {
            let value = word.wait(&self.core, py, conn_id.map(ConnId), until, timeout)?;
            value.ok_or_else(|| Stop::refuse("the word was not that in time"))
        });
        settle(waited.map(|value| (true, value)), (false, 0))
    }

    /// Has later work on a CUDA stream wait until a word of eight bytes, in a GPU's memory or in
    /// pinned host memory, has reached `value`: `True`, or `False` with `last_error()`. With `conn_id`
    /// the stream also goes on when that connection is lost or the time is over: read the word to know.
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
        let held = Word::of(&self.core, ptr, mr_id).and_then(|Word { mr, ptr }| {
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
    fn cancel(&self, py: Python<'_>, transfer_id: u64) -> bool {
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

    /// The reason of the last failed call on this thread; None if none has failed.
    #[staticmethod]
    fn last_error() -> Option<String> {
        error::last()
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

    /// Waits until messages are there or `timeout` seconds have passed, and takes them.
    #[pyo3(signature = (timeout=None))]
    fn wait_notifs<'py>(
        &self,
        py: Python<'py>,
        timeout: Option<f64>,
    ) -> PyResult<Vec<(u64, Bound<'py, PyBytes>)>> {
        let timeout = wait_timeout(timeout)?;
        let arrived =
            waiting(py, &self.core, |core, interrupt| core.wait_notifs(timeout, interrupt))?;
        let arrived = match arrived {
            Err(Error::Timeout(_)) => Vec::new(),
            arrived => error::or_refuse(arrived, Vec::new()),
        };
        Ok(notifs(py, arrived))
    }

    /// Allocates memory that peers on this host can map; `uccl.p2p` makes it a buffer.
    fn _alloc(&self, py: Python<'_>, size: usize) -> PyResult<PySharedMemory> {
        let core = &self.core;
        let memory = py.detach(|| core.alloc(size)).map_err(|e| error::exception(&e))?;
        Ok(PySharedMemory::new(memory))
    }

    /// The path of one-sided transfers with this metadata: 'mapped', 'cma', 'cuda_ipc', 'shm',
    /// 'verbs', 'libfabric', 'tcp' or 'fifo'; with a region of ours also 'owner', if the peer makes
    /// long copies.
    #[pyo3(signature = (conn_id, meta, mr_id=None))]
    fn path(
        &self,
        conn_id: u64,
        meta: &Bound<'_, PyAny>,
        mr_id: Option<u64>,
    ) -> PyResult<Option<&'static str>> {
        let advert = match crate::meta::advert(meta) {
            Ok(advert) => advert,
            Err(Stop::Raise(e)) => return Err(e),
            Err(Stop::Refuse(reason)) => return Ok(error::refuse(reason, None)),
        };
        let conn = ConnId(conn_id);
        let path = match mr_id {
            Some(mr) => self.core.path_from(conn, region_of(mr), &advert),
            None => self.core.path(conn, &advert),
        };
        Ok(path.map_or_else(|e| error::refuse(e, None), Some))
    }

    /// Counters since the endpoint was made.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let stats = self.core.stats().map_err(|e| error::exception(&e))?;
        crate::json::to_python(py, &stats)
    }

    /// Information on a connection; None if there is no such connection.
    fn connection<'py>(
        &self,
        py: Python<'py>,
        conn_id: u64,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self.core.connection(ConnId(conn_id)) {
            Ok(info) => Ok(Some(crate::json::to_python(py, &info)?)),
            Err(e) => Ok(error::refuse(e, None)),
        }
    }

    /// Information on a region: `addr`, `len`, `kind` ('host', 'pinned', 'cuda:0', ...),
    /// `numa_node` and the nearest `nic`, if they are known; None if there is no such region.
    fn region_info<'py>(&self, py: Python<'py>, mr_id: u64) -> PyResult<Option<Bound<'py, PyAny>>> {
        let core = &self.core;
        // The first look at the machine's NICs takes a while.
        match py.detach(|| core.region_info(region_of(mr_id))) {
            Ok(info) => Ok(Some(crate::json::to_python(py, &info)?)),
            Err(e) => Ok(error::refuse(e, None)),
        }
    }

    /// The CPUs of the worker threads, near the GPU; None if they may run on all CPUs of the
    /// process.
    fn worker_cpus(&self) -> Option<Vec<u32>> {
        self.core.worker_cpus().map(|cpus| cpus.iter().collect())
    }

    /// Always 2**64 - 1: no connection belongs to a rank.
    fn conn_id_of_rank(&self, rank: i64) -> u64 {
        let _ = rank;
        u64::MAX
    }

    /// Fails unfinished transfers, ends all regions, closes all connections and stops the endpoint.
    ///
    /// True when no byte lands in this endpoint's memory any more. If a peer may still touch some
    /// of it, the result is False, `last_error()` names the regions, their buffers are kept
    /// allocated, and the same call waits once more.
    fn close(&self, py: Python<'_>) -> bool {
        error::ok(self.shut(py))
    }

    fn __enter__(this: Bound<'_, Self>) -> Bound<'_, Self> {
        this
    }

    /// Closes the endpoint. A `RuntimeError` names the regions that a peer may still touch. If the
    /// block has raised an exception, that is raised instead, and `last_error()` names the regions.
    #[pyo3(signature = (*exception))]
    fn __exit__(&self, py: Python<'_>, exception: Args<'_, '_>) -> PyResult<()> {
        let Err(e) = self.shut(py) else { return Ok(()) };
        let is_in_flight = exception.iter().any(|part| !part.is_none());
        let raised = error::exception(&e);
        error::refuse(e, ());
        if is_in_flight { Ok(()) } else { Err(raised) }
    }

    fn __repr__(&self) -> &'static str {
        "<UCCL P2P Endpoint>"
    }
}

/// The value, or an exception: for calls without a failure value.
fn raising<T>(result: Result<T, Stop>) -> PyResult<T> {
    result.map_err(|stop| match stop {
        Stop::Raise(e) => e,
        Stop::Refuse(reason) => PyRuntimeError::new_err(reason),
    })
}

/// Converts a timeout: zero checks once, None (or infinity) waits for ever.
fn wait_timeout(timeout: Option<f64>) -> PyResult<Option<Duration>> {
    match timeout {
        None | Some(f64::INFINITY) => Ok(None),
        Some(timeout) => args::seconds(timeout).map(Some),
    }
}

fn notifs(py: Python<'_>, arrived: Vec<uccl_p2p::Notification>) -> Vec<(u64, Bound<'_, PyBytes>)> {
    arrived.into_iter().map(|n| (n.conn.0, PyBytes::new(py, &n.payload))).collect()
}
