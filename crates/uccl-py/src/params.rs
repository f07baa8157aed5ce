//! The parameters of this package's calls, under the names of both generations of callers.

/// The names of one parameter; errors use the first.
pub(crate) type Names = &'static [&'static str];

macro_rules! params {
    ($($param:ident: $($name:literal)+;)+) => {
        /// A parameter of a call.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[allow(missing_docs)]
        pub(crate) enum Param {
            $($param,)+
        }

        impl Param {
            /// The names that callers may use for it.
            pub(crate) const fn names(self) -> Names {
                match self {
                    $(Self::$param => &[$($name),+],)+
                }
            }
        }
    };
}

params! {
    Conn: "conn_id";
    // Transfers.
    Mr: "mr_id";
    Ptr: "ptr" "src" "dst" "addr" "data_ptr";
    Size: "size" "len";
    Meta: "meta" "slot_item" "meta_blob";
    Info: "info" "info_blob";
    MrV: "mr_id_v" "mr_id_list" "mr_ids";
    PtrV: "ptr_v" "data_ptr_v" "ptr_list" "src_list" "dst_list" "addr_list" "ptrs";
    SizeV: "size_v" "size_list" "len_list" "sizes";
    MetaV: "meta_blob_v" "slot_item_list" "meta_v" "metas";
    InfoV: "info_v" "info_list";
    NumIovs: "num_iovs";
    Notif: "notif";
    Timeout: "timeout";
    Stream: "stream";
    Signal: "signal";
    Strong: "strong";
    Context: "context";
    // Descriptors.
    OpName: "op_name";
    LocalDescs: "local_desc_list" "local_descs";
    RemoteDescs: "remote_desc_list" "remote_descs";
    // Regions and adverts.
    FloatType: "floatType" "float_type";
    OutBuf: "out_buf";
    OutBufV: "out_buf_list" "out_buf_v";
    // Peers.
    RemoteIp: "remote_ip_addr" "ip_addr" "ip";
    RemoteGpu: "remote_gpu_idx" "remote_gpu_bdf" "remote_gpu";
    RemotePort: "remote_port" "port";
    // The endpoint's settings.
    GpuIndex: "local_gpu_idx" "gpu_index";
    NumCpus: "num_cpus";
    Psk: "psk";
    Bind: "bind";
    Port: "port" "listen_port";
    BasePort: "base_port";
    TransferTimeout: "transfer_timeout";
    Transport: "transport";
    TcpStreams: "tcp_streams";
    TcpCongestion: "tcp_congestion";
    Checksum: "checksum";
    Cma: "cma";
    Ipc: "ipc";
    SpinUs: "spin_us";
    NumaAffinity: "numa_affinity";
}
