//! The table of signatures: the parameters of each call that binds its arguments itself.
//!
//! A call's arguments are bound by this table, Python's `inspect.signature` shows it, and
//! `cargo xtask stubs` writes it into python/uccl/_core.pyi.

use crate::{args::Signature, params::Param};

/// The parameters of a signature, in order.
macro_rules! params_of {
    ((
        $($pos:ident $(= $default:tt)?),+
        $(, *, $($kw:ident = $value:tt),+)? $(; $($more:ident),+)?
    )) => {
        [$(Param::$pos,)+ $($(Param::$kw,)+)? $($(Param::$more,)+)?]
    };
}

/// The number of parameters that may be positional.
macro_rules! positional_of {
    ((
        $($pos:ident $(= $default:tt)?),+
        $(, *, $($kw:ident = $value:tt),+)? $(; $($more:ident),+)?
    )) => {
        [$(Param::$pos),+].len()
    };
}

/// The signature in Python's words, with the line that ends it for Python.
macro_rules! text_of {
    (
        $function:literal $open:literal
        ($first:ident $(= $none:tt)? $(, $pos:ident $(= $default:tt)?)*
            $(, *, $($kw:ident = $value:tt),+)? $(; $($more:ident),+)?)
    ) => {
        concat!(
            $function, $open, name!($first), $("=", stringify!($none),)?
            $(", ", name!($pos), $("=", stringify!($default),)?)*
            $(", *", $(", ", name!($kw), "=", stringify!($value),)+)?
            ")\n--\n"
        )
    };
}

macro_rules! open_of {
    (method $function:literal $params:tt) => {
        text_of!($function "($self, " $params)
    };
    (class $function:literal $params:tt) => {
        text_of!($function "(" $params)
    };
}

macro_rules! signatures {
    ($($kind:ident $($id:ident $function:literal),+: $params:tt;)+) => {
        $($(
            pub(crate) static $id: Signature<{ params_of!($params).len() }> = Signature {
                function: $function,
                params: params_of!($params),
                positional: positional_of!($params),
            };
        )+)+

        /// The text of a signature, which is the first part of a method's documentation.
        macro_rules! signature {
            $($(($id) => { open_of!($kind $function $params) };)+)+
        }
    };
}

// Parameters as in a `def` of Python, by their names in `params.rs`. Those behind a semicolon are
// accepted, and not shown: the engine refuses them with a reason.
signatures! {
    class NEW "Endpoint": (
        GpuIndex = None, NumCpus = None, *, Psk = None, Bind = None, Port = None, BasePort = None,
        Timeout = None, TransferTimeout = None, Transport = None, TcpStreams = None,
        TcpCongestion = None, Checksum = None, Cma = None, Ipc = None, SpinUs = None,
        NumaAffinity = None, Publish = None, RdmaDev = None
    );

    method CONNECT "connect":
        (RemoteIp, RemoteGpu = None, RemotePort = None, *, Timeout = None);
    method CONNECT_LOCAL "connect_local": (RemoteGpu, *, Timeout = None);

    method REG "reg": (Ptr, Size = None, FloatType = None);
    method REGV "regv": (Ptrs, Sizes = None);
    method ADVERTISE "advertise": (Conn, Mr, Ptr, Size, OutBuf = None);
    method ADVERTISEV "advertisev": (Conn, MrV, PtrV, SizeV, OutBufV = None, NumIovs = None);
    method ADVERTISE_IPC "advertise_ipc": (Conn, Ptr, Size = None);
    method ADVERTISEV_IPC "advertisev_ipc": (Conn, PtrV, SizeV = None, NumIovs = None);

    method TRANSFER "transfer":
        (Conn, OpName, LocalDescs, RemoteDescs, *, Notif = None, Timeout = None, Stream = None);

    method PREPARE "prepare": (OpName, MrV, PtrV, SizeV, MetaV, NumIovs = None);

    method SEND "send", SEND_ASYNC "send_async":
        (Conn, Mr, Ptr, Size = None, *, Notif = None, Timeout = None, Stream = None);
    method RECV "recv", RECV_ASYNC "recv_async":
        (Conn, Mr, Ptr, Size = None, *, Timeout = None, Stream = None; Notif);
    method SENDV "sendv", SENDV_ASYNC "sendv_async": (
        Conn, MrV, PtrV, SizeV = None, NumIovs = None, *,
        Notif = None, Timeout = None, Stream = None
    );
    method RECVV "recvv", RECVV_ASYNC "recvv_async":
        (Conn, MrV, PtrV, SizeV = None, NumIovs = None, *, Timeout = None, Stream = None; Notif);

    method READ "read", READ_ASYNC "read_async":
        (Conn, Mr, Ptr, Size, Meta, *, Notif = None, Timeout = None, Stream = None);
    method WRITE "write", WRITE_ASYNC "write_async": (
        Conn, Mr, Ptr, Size, Meta, *, Notif = None, Timeout = None, Stream = None,
        Signal = None, Strong = False, Context = 0
    );
    method READV "readv", READV_ASYNC "readv_async": (
        Conn, MrV, PtrV, SizeV, MetaV, NumIovs = None, *,
        Notif = None, Timeout = None, Stream = None
    );
    method WRITEV "writev", WRITEV_ASYNC "writev_async": (
        Conn, MrV, PtrV, SizeV, MetaV, NumIovs = None, *,
        Notif = None, Timeout = None, Stream = None, Signal = None, Strong = False, Context = 0
    );

    method READ_BY_ADDRESS "read_by_address", READ_BY_ADDRESS_ASYNC "read_by_address_async",
        WRITE_BY_ADDRESS "write_by_address", WRITE_BY_ADDRESS_ASYNC "write_by_address_async":
        (Conn, PtrV, RemotePtrV, SizeV = None, *, Timeout = None);

    method SEND_IPC "send_ipc", SEND_IPC_ASYNC "send_ipc_async":
        (Conn, Ptr, Size = None, *, Notif = None, Timeout = None, Stream = None);
    method RECV_IPC "recv_ipc", RECV_IPC_ASYNC "recv_ipc_async":
        (Conn, Ptr, Size = None, *, Timeout = None, Stream = None; Notif);
    method READ_IPC "read_ipc", READ_IPC_ASYNC "read_ipc_async",
        WRITE_IPC "write_ipc", WRITE_IPC_ASYNC "write_ipc_async":
        (Conn, Ptr, Size, Info, *, Notif = None, Timeout = None, Stream = None);
    method READV_IPC "readv_ipc", READV_IPC_ASYNC "readv_ipc_async",
        WRITEV_IPC "writev_ipc", WRITEV_IPC_ASYNC "writev_ipc_async": (
        Conn, PtrV, SizeV, InfoV, NumIovs = None, *,
        Notif = None, Timeout = None, Stream = None
    );
}
