//! Descriptors of registered tensors, and transfers between them.

use pyo3::{exceptions::PyRuntimeError, prelude::*};
use uccl_p2p::{ConnId, Iov, Op};
use uccl_wire::descs::{self, XferDesc};

use crate::{
    args::{self, Keywords, Positional},
    call::{Call, Extras, Pieces},
    endpoint::PyEndpoint,
    error::CallError,
    memory::Memory,
    params::Param,
    registration,
    reuse::region_of,
    signatures,
};

/// The `mr_id` of a descriptor without a region in this process.
const NO_REGION: u64 = u64::MAX;

/// A registered tensor: its own process knows it by `mr_id`, others by `rkeys`.
#[pyclass(name = "XferDesc", module = "uccl.p2p")]
#[derive(Clone)]
pub(crate) struct PyXferDesc {
    desc: XferDesc,
    /// The tensor's number in the process that registered it; 2**64 - 1 elsewhere.
    #[pyo3(get, set)]
    mr_id: u64,
}

#[pymethods]
impl PyXferDesc {
    #[new]
    #[pyo3(signature = (addr=0, size=0, mr_id=NO_REGION, lkeys=Vec::new(), rkeys=Vec::new()))]
    fn new(addr: u64, size: u64, mr_id: u64, lkeys: Vec<u32>, rkeys: Vec<u32>) -> Self {
        Self { desc: XferDesc { addr, size, lkeys, rkeys, ipc: Vec::new() }, mr_id }
    }

    /// Address in the owner's process.
    #[getter]
    fn addr(&self) -> u64 {
        self.desc.addr
    }

    #[setter]
    fn set_addr(&mut self, addr: u64) {
        self.desc.addr = addr;
    }

    /// Size in bytes.
    #[getter]
    fn size(&self) -> u64 {
        self.desc.size
    }

    #[setter]
    fn set_size(&mut self, size: u64) {
        self.desc.size = size;
    }

    /// Keys for the owner's own use.
    #[getter]
    fn lkeys(&self) -> Vec<u32> {
        self.desc.lkeys.clone()
    }

    #[setter]
    fn set_lkeys(&mut self, lkeys: Vec<u32>) {
        self.desc.lkeys = lkeys;
    }

    /// Keys for its peers.
    #[getter]
    fn rkeys(&self) -> Vec<u32> {
        self.desc.rkeys.clone()
    }

    #[setter]
    fn set_rkeys(&mut self, rkeys: Vec<u32>) {
        self.desc.rkeys = rkeys;
    }

    fn __repr__(&self) -> String {
        let XferDesc { addr, size, .. } = &self.desc;
        format!("<XferDesc addr={addr} size={size} mr_id={}>", self.mr_id)
    }
}

/// A transfer that `transfer` started.
#[pyclass(name = "XferHandle", module = "uccl.p2p", frozen, get_all)]
pub(crate) struct PyXferHandle {
    conn_id: u64,
    op_name: String,
    transfer_id: u64,
}

#[pymethods]
impl PyXferHandle {
    #[new]
    fn new(conn_id: u64, op_name: String, transfer_id: u64) -> Self {
        Self { conn_id, op_name, transfer_id }
    }

    fn __repr__(&self) -> String {
        let Self { conn_id, op_name, transfer_id } = self;
        format!("<XferHandle conn_id={conn_id} op_name={op_name:?} transfer_id={transfer_id}>")
    }
}

/// The transfer of a handle: an `XferHandle`, the result of `transfer`, or an id.
pub(crate) fn transfer_of(handle: &Bound<'_, PyAny>) -> PyResult<u64> {
    if let Ok(handle) = handle.cast::<PyXferHandle>() {
        return Ok(handle.get().transfer_id);
    }
    match handle.extract::<(bool, u64)>() {
        Ok((_, transfer_id)) => Ok(transfer_id),
        Err(_) => handle.extract(),
    }
}

/// `register_memory(tensors)`: all or none.
pub(crate) fn register(
    ep: &PyEndpoint,
    py: Python<'_>,
    tensors: &Bound<'_, PyAny>,
) -> Result<Vec<PyXferDesc>, CallError> {
    let tensors = args::list(tensors, |tensor| Ok(tensor.clone()))?;
    let memories = tensors.iter().enumerate().map(|(i, tensor)| of_tensor(i, tensor));
    let memories = memories.collect::<PyResult<Vec<_>>>()?;
    let ranges: Vec<_> = memories.iter().map(|m| (m.addr, m.len.unwrap_or_default())).collect();
    let mrs = add_all(ep, py, memories)?;
    mrs.into_iter().zip(ranges).map(|(number, range)| describe(ep, number, range)).collect()
}

/// Registers tensors, all or none, or finds the regions that they lie in.
fn add_all(ep: &PyEndpoint, py: Python<'_>, tensors: Vec<Memory>) -> Result<Vec<u64>, CallError> {
    let mut mrs = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        match add(ep, py, tensor) {
            Ok(mr) => mrs.push(mr),
            Err(stop) => {
                for mr in mrs {
                    // New regions end, and shared ones lose this use.
                    let _ = registration::remove(ep, py, mr);
                }
                return Err(stop);
            }
        }
    }
    Ok(mrs)
}

fn add(ep: &PyEndpoint, py: Python<'_>, tensor: Memory) -> Result<u64, CallError> {
    let range = (tensor.addr, tensor.len.unwrap_or_default(), tensor.is_readonly());
    let number = py.detach(|| ep.reuse.join(&ep.core, range))?;
    ep.regions.keep(region_of(number), tensor.owner);
    Ok(number)
}

fn describe(
    ep: &PyEndpoint,
    number: u64,
    (addr, len): (usize, usize),
) -> Result<PyXferDesc, CallError> {
    let mr = region_of(number);
    let mut desc = XferDesc { addr: addr as u64, size: len as u64, ..XferDesc::default() };
    // A peer with keys may write, so a read-only buffer has none.
    if !ep.regions.is_readonly(mr.0) {
        let advert = ep.core.advertise(mr, addr, len)?;
        desc = XferDesc { ipc: ep.ipc_info(&advert).to_vec(), ..XferDesc::of_advert(&advert) };
        // Equal for descriptors that share a region, and only for these; a transfer uses the
        // region's id.
        desc.lkeys.fill(mr.0 as u32);
    }
    Ok(PyXferDesc { desc, mr_id: number })
}

fn of_tensor(i: usize, tensor: &Bound<'_, PyAny>) -> PyResult<Memory> {
    let not_one = |why: String| {
        PyRuntimeError::new_err(format!("object at index {i} is not a tensor ({why})"))
    };
    if args::integer(tensor).is_some() {
        return Err(not_one("it is a number".into()));
    }
    if tensor.hasattr("data_ptr")? {
        for method in ["numel", "element_size"] {
            // An object of this package with an address and the buffer protocol needs neither
            // method.
            if !tensor.hasattr(method)? && Memory::of(tensor).is_err() {
                return Err(not_one(format!("missing {method}() method")));
            }
        }
    }
    Memory::of(tensor).map_err(|e| not_one(e.value(tensor.py()).to_string()))
}

/// `deregister_memory(descs)`.
pub(crate) fn deregister(
    ep: &PyEndpoint,
    py: Python<'_>,
    descs: &Bound<'_, PyAny>,
) -> Result<(), CallError> {
    let mut first_failure = Ok(());
    for mr in ids(descs)?.into_iter().filter(|&mr| mr != NO_REGION) {
        first_failure = first_failure.and(registration::remove(ep, py, mr));
    }
    Ok(first_failure?)
}

/// The region ids of descriptors.
fn ids(descs: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    args::list(descs, |desc| desc.getattr("mr_id")?.extract())
}

/// `get_serialized_descs(descs)`.
pub(crate) fn serialize(descs: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    let descs = args::list(descs, |desc| Ok(desc.cast::<PyXferDesc>()?.borrow().desc.clone()))?;
    descs::encode_descs(&descs).map_err(|e| PyRuntimeError::new_err(e.to_string()))
}

/// `deserialize_descs(bytes)`.
pub(crate) fn deserialize(bytes: &[u8]) -> PyResult<Vec<PyXferDesc>> {
    if bytes.is_empty() {
        return Ok(Vec::new());
    }
    let descs = descs::decode_descs(bytes)
        .map_err(|e| PyRuntimeError::new_err(format!("invalid serialized descriptors: {e}")))?;
    Ok(descs.into_iter().map(|desc| PyXferDesc { desc, mr_id: NO_REGION }).collect())
}

/// `transfer(conn_id, op_name, local_descs, remote_descs)`.
pub(crate) fn transfer(
    ep: &PyEndpoint,
    args: Positional<'_, '_>,
    kwargs: Keywords<'_, '_>,
) -> Result<Call, CallError> {
    let a = signatures::TRANSFER.bind(args, kwargs)?;
    let clone = |desc: &Bound<'_, PyAny>| Ok(desc.cast::<PyXferDesc>()?.borrow().clone());
    let (local, remote) = (a.list(Param::LocalDescs, clone)?, a.list(Param::RemoteDescs, clone)?);
    if local.len() != remote.len() {
        return Err(CallError::runtime(format!(
            "local and remote descriptors must be as many ({} and {} given)",
            local.len(),
            remote.len()
        )));
    }
    let op = op_of(&a)?;
    let conn = ConnId(a.req(Param::Conn)?);
    if let Err(e) = ep.core.connection(conn) {
        return Err(CallError::runtime(format!("Invalid conn_id: {e}")));
    }
    let mut iovs = Vec::with_capacity(local.len());
    let mut adverts = Vec::with_capacity(remote.len());
    for (local, remote) in local.iter().zip(&remote) {
        if local.mr_id == NO_REGION || remote.desc.rkeys.is_empty() {
            return Err(CallError::runtime(
                "a transfer needs local descriptors from register_memory, and remote ones with keys",
            ));
        }
        if op == Op::Read && ep.regions.is_readonly(region_of(local.mr_id).0) {
            return Err(CallError::refuse(
                "the destination was registered from a read-only buffer",
            ));
        }
        iovs.push(iov(local)?);
        adverts.push(remote.desc.advert().map_err(CallError::refuse)?);
    }
    let extras = Extras::of(ep, &a)?;
    Ok(Call { conn, op, pieces: Pieces::Many(iovs), adverts: Pieces::Many(adverts), extras })
}

/// The operation of a call that names it.
pub(crate) fn op_of<const N: usize>(a: &args::Args<'_, N>) -> Result<Op, CallError> {
    // UCCL's own test writes them in capitals.
    match a.req::<String>(Param::OpName)?.as_str() {
        "read" | "READ" => Ok(Op::Read),
        "write" | "WRITE" => Ok(Op::Write),
        name => Err(CallError::runtime(format!("Invalid op_name: {name}"))),
    }
}

fn iov(local: &PyXferDesc) -> Result<Iov, CallError> {
    let address = |n: u64| usize::try_from(n).map_err(CallError::refuse);
    let (ptr, len) = (address(local.desc.addr)?, address(local.desc.size)?);
    Ok(Iov { mr: region_of(local.mr_id), ptr, len })
}
