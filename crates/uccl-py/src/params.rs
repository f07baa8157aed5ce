//! The parameters of this package's calls, under the names of both generations of callers.

/// The names of one parameter; errors use the first.
pub(crate) type Names = &'static [&'static str];

macro_rules! params {
    ($($param:ident: $first:literal $($name:literal)* => $python:literal;)+) => {
        /// A parameter of a call.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(crate) enum Param {
            $(
                #[doc = concat!("In Python: `", $first, ": ", $python, "`.")]
                $param,
            )+
        }

        impl Param {
            /// The names that callers may use for it.
            pub(crate) const fn names(self) -> Names {
                match self {
                    $(Self::$param => &[$first, $($name),*],)+
                }
            }
        }

        /// The first name of a parameter, as a literal.
        macro_rules! name {
            $(($param) => { $first };)+
        }
    };
}

// The names of each parameter, and its type in Python. Aliases of types are in
// python/uccl/_core.pyi.
params! {
    Conn: "conn_id" => "int";
    // Transfers.
    Mr: "mr_id" => "int";
    Ptr: "ptr" "src" "dst" "addr" "data_ptr" => "_Pointer";
    Size: "size" "len" => "int | None";
    Meta: "meta" "slot_item" "meta_blob" => "Buffer";
    Info: "info" "info_blob" => "Buffer";
    MrV: "mr_id_v" "mr_id_list" "mr_ids" => "_Ids";
    PtrV: "ptr_v" "data_ptr_v" "ptr_list" "src_list" "dst_list" "addr_list" "ptrs" => "_Pointers";
    SizeV: "size_v" "size_list" "len_list" "sizes" => "_Sizes | None";
    Ptrs: "ptrs" "ptr_v" "data_ptr_v" "ptr_list" "src_list" "dst_list" "addr_list" => "_Pointers";
    Sizes: "sizes" "size_v" "size_list" "len_list" => "_Sizes | None";
    RemotePtrV: "remote_ptr_v" "remote_addr_v" "peer_addresses" => "_Ids";
    MetaV: "meta_v" "meta_blob_v" "slot_item_list" "metas" => "_Blobs";
    InfoV: "info_v" "info_list" => "_Blobs";
    NumIovs: "num_iovs" => "int";
    Notif: "notif" => "Buffer";
    Timeout: "timeout" => "float";
    Stream: "stream" => "_Stream";
    Signal: "signal" => "_Signal";
    Strong: "strong" => "bool";
    Context: "context" => "int";
    // Descriptors.
    OpName: "op_name" => r#"Literal["read", "write", "READ", "WRITE"]"#;
    LocalDescs: "local_desc_list" "local_descs" => "Iterable[XferDesc]";
    RemoteDescs: "remote_desc_list" "remote_descs" => "Iterable[XferDesc]";
    // Regions and adverts.
    FloatType: "floatType" "float_type" => "int";
    OutBuf: "out_buf" => "Buffer";
    OutBufV: "out_buf_list" "out_buf_v" => "_Blobs";
    // Peers.
    RemoteIp: "remote_ip_addr" "ip_addr" "ip" => "str";
    RemoteGpu: "remote_gpu_idx" "remote_gpu_bdf" "remote_gpu" => "int | str";
    RemotePort: "remote_port" "port" => "int";
    // The endpoint's settings.
    GpuIndex: "local_gpu_idx" "gpu_index" => "int";
    NumCpus: "num_cpus" => "int";
    Psk: "psk" => "str | Buffer";
    Publish: "publish" => "bool";
    Bind: "bind" => "str";
    Port: "port" "listen_port" => "int";
    BasePort: "base_port" => "int";
    RdmaDev: "rdma_dev" => "str";
    TransferTimeout: "transfer_timeout" => "float";
    Transport: "transport" => "_Transport";
    TcpStreams: "tcp_streams" => "int";
    TcpCongestion: "tcp_congestion" => "str";
    Checksum: "checksum" => "_Checksum";
    Cma: "cma" => "bool";
    Ipc: "ipc" => "bool";
    SpinUs: "spin_us" => "int";
    NumaAffinity: "numa_affinity" => "bool";
}
