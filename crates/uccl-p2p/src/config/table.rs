//! The table of settings: the environment variable of each, and how it changes the configuration.

use std::{str::FromStr, time::Duration};

use uccl_libfabric::{Devices, LibfabricSettings, Threading};
use uccl_verbs::{ParseDeviceNameError, RelaxedOrdering, VerbsSettings};

use super::{Checksum, Config, Setting};

/// Names that UCCL and NCCL give to the same setting, where they differ from ours.
pub(super) const TWINS: &[(&str, &[&str])] = &[
    ("UCCL_IB_HCA", &["NCCL_IB_HCA"]),
    ("UCCL_P2P_NUMA_AFFINITY", &["UCCL_PIN_TO_NUMA"]),
    ("UCCL_P2P_RDMA_SL", &["UCCL_IB_SERVICE_LEVEL", "UCCL_ROCE_SERVICE_LEVEL"]),
    ("UCCL_P2P_RDMA_TC", &["UCCL_ROCE_TRAFFIC_CLASS"]),
    ("UCCL_SOCKET_IFNAME", &["NCCL_SOCKET_IFNAME"]),
];

/// Every setting. The table of docs/settings.md is made from this.
pub(super) const SETTINGS: &[Setting] = &[
    Setting {
        name: "UCCL_CHUNK_SIZE_KB",
        default: "512; over UC what losses suggest",
        doc: "What is moved by RDMA is cut into pieces of so many KiB, which spread over devices",
        apply: |config, value| rdma(config, value, |verbs, n| verbs.chunk_kib = n),
    },
    Setting {
        name: "UCCL_CXI_CQ_SIZE",
        default: "8192 for cxi; else the provider's",
        doc: "Completions that a queue of libfabric holds",
        apply: |config, value| fabric(config, value, |fabric, n| fabric.cq_size = Some(n)),
    },
    Setting {
        name: "UCCL_CXI_DEVICE_INDEX",
        default: "for cxi the GPU's index modulo their number; else all",
        doc: "Which of libfabric's domains is used, by its place among all",
        apply: |config, value| {
            fabric(config, value, |fabric, n| fabric.devices = Devices::Index(n))
        },
    },
    Setting {
        name: "UCCL_CXI_DOMAIN",
        default: "as UCCL_CXI_DEVICE_INDEX",
        doc: "Which of libfabric's domains are used, by name, with commas between them: `cxi0,cxi1`",
        apply: |config, value| {
            let names = value.split(',').map(|name| name.trim().to_owned()).collect();
            config.libfabric.devices = Devices::Named(names);
            config.libfabric.validate().map_err(|e| e.to_string())
        },
    },
    Setting {
        name: "UCCL_CXI_RX_QUEUE_SIZE",
        default: "4096 for cxi; else the provider's",
        doc: "Operations that a receive queue of libfabric holds",
        apply: |config, value| fabric(config, value, |fabric, n| fabric.rx_size = Some(n)),
    },
    Setting {
        name: "UCCL_CXI_THREADING",
        default: "safe",
        doc: "Who keeps threads apart in libfabric: `safe` (the provider), `domain` (this library, by one lock a device)",
        apply: |config, value| {
            config.libfabric.threading = match value {
                "safe" => Threading::Safe,
                "domain" => Threading::Domain,
                _ => return Err("use safe or domain".into()),
            };
            Ok(())
        },
    },
    Setting {
        name: "UCCL_CXI_TX_QUEUE_SIZE",
        default: "4096 for cxi; else the provider's",
        doc: "Operations that a send queue of libfabric holds",
        apply: |config, value| fabric(config, value, |fabric, n| fabric.tx_size = Some(n)),
    },
    Setting {
        name: "UCCL_IBV_SO",
        default: "libibverbs.so.1",
        doc: "The library for RDMA verbs, by name or path",
        apply: |config, value| {
            config.verbs.library = Some(value.to_owned());
            Ok(())
        },
    },
    Setting {
        name: "UCCL_IB_HCA",
        default: "all that are up",
        doc: "RDMA devices to choose from where `UCCL_P2P_RDMA_DEV` names none, by how their names begin, with commas between them: `mlx5`, `mlx5_0:1`; `=mlx5_1` is the whole name, `^mlx5_2` all others",
        apply: |config, value| {
            config.rdma_devices = Some(value.parse()?);
            Ok(())
        },
    },
    Setting {
        name: "UCCL_IB_PCI_RELAXED_ORDERING",
        default: "2",
        doc: "`1` lets RDMA devices reorder their writes to memory on the PCI bus, which many machines need for full speed; `2` does where it can be asked for, `0` does not. When a transfer has ended, all bytes are there. A program that polls memory must not conclude from the last byte that the earlier ones have come",
        apply: |config, value| {
            config.verbs.relaxed_ordering = match value {
                "0" => RelaxedOrdering::Never,
                "1" => RelaxedOrdering::Always,
                "2" => RelaxedOrdering::Auto,
                _ => return Err("use 0, 1 or 2".into()),
            };
            Ok(())
        },
    },
    Setting {
        name: "UCCL_LIBFABRIC_PROVIDER",
        default: "the best that there is",
        doc: "Which provider `UCCL_P2P_TRANSPORT=libfabric` uses, as `fi_info` writes it: `tcp`, `tcp;ofi_rxm`",
        apply: |config, value| {
            config.libfabric.provider = Some(value.to_owned());
            config.libfabric.validate().map_err(|e| e.to_string())
        },
    },
    Setting {
        name: "UCCL_LIBFABRIC_SO",
        default: "libfabric.so.1",
        doc: "The library for libfabric, by name or path, or the folder that it is in",
        apply: |config, value| {
            config.libfabric.library = Some(value.into());
            Ok(())
        },
    },
    Setting {
        name: "UCCL_P2P_ASK_OWNERS",
        default: "0",
        doc: "`1` asks the peer that owns memory to copy to and from it wherever that is possible, and copies for peers that ask, so that the owner's processors do the work; both ends must set it. `0` asks only where the owner's GPUs reach what this process's do not",
        apply: |config, value| flag(value).map(|ask| config.ask_owners = ask),
    },
    Setting {
        name: "UCCL_P2P_BASE_PORT",
        default: "28100",
        doc: "Where well-known ports start: an endpoint listens on this plus its GPU index if that is free, else on any port",
        apply: |config, value| number(value).map(|port| config.base_port = port),
    },
    Setting {
        name: "UCCL_P2P_BIND",
        default: "all",
        doc: "The address to listen on; `127.0.0.1` keeps an endpoint to its own host",
        apply: |config, value| {
            let ip = value.parse().map_err(|_| "not an IP address".to_owned())?;
            config.bind = Some(ip);
            Ok(())
        },
    },
    Setting {
        name: "UCCL_P2P_CHECKSUM",
        default: "auto",
        doc: "When streams carry a CRC-32C of their data: `auto` (across a network), `on`, `off`",
        apply: |config, value| {
            config.checksum = match value {
                "auto" => Checksum::Auto,
                "on" | "1" => Checksum::On,
                "off" | "0" => Checksum::Off,
                _ => return Err("use auto, on or off".into()),
            };
            Ok(())
        },
    },
    Setting {
        name: "UCCL_P2P_DISABLE_CMA",
        default: "0",
        doc: "`1` does without `process_vm_readv` and `process_vm_writev`: the same host then uses shared memory",
        apply: |config, value| flag(value).map(|disable| config.cma = !disable),
    },
    Setting {
        name: "UCCL_P2P_DISABLE_IPC",
        default: "0",
        doc: "`1` keeps other processes from opening this one's GPU memory (CUDA IPC): it then passes through host memory, on the same host too",
        apply: |config, value| flag(value).map(|disable| config.ipc = !disable),
    },
    Setting {
        name: "UCCL_P2P_MAX_INFLIGHT_OPS",
        default: "256; 32 for cxi",
        doc: "Operations of libfabric that a connection has in flight on each device; more than the default is cut to it",
        apply: |config, value| fabric(config, value, |fabric, n| fabric.max_inflight = n),
    },
    Setting {
        name: "UCCL_P2P_MAX_STREAMS",
        default: "8192",
        doc: "Streams of connections that peers may have open to an endpoint; beyond that they are refused until others end. A connection over TCP has 1 to 4 unless `UCCL_P2P_TCP_STREAMS` says more, one within a host 1; each takes a descriptor and 128 KiB (320 with a secret). All from one IP address (or one /64 of IPv6) get no more than half",
        apply: |config, value| match number(value)? {
            0 => Err("use at least 1".into()),
            most => {
                config.max_streams = most;
                Ok(())
            }
        },
    },
    Setting {
        name: "UCCL_P2P_NUM_CPUS",
        default: "the machine's, at most 4",
        doc: "Most worker threads of an endpoint",
        apply: |config, value| match number(value)? {
            0 => Err("at least one is needed".into()),
            n => {
                config.num_cpus = n;
                Ok(())
            }
        },
    },
    Setting {
        name: "UCCL_P2P_NUMA_AFFINITY",
        default: "1",
        doc: "`0` lets worker threads run on every CPU that the process may use; else they keep to those on the NUMA node of the endpoint's GPU, if these suffice",
        apply: |config, value| flag(value).map(|near| config.numa_affinity = near),
    },
    Setting {
        name: "UCCL_P2P_PSK",
        default: "none",
        doc: "A secret that both ends must prove before anything else is read; use 16 random bytes or more",
        apply: |config, value| {
            config.psk = Some(value.as_bytes().to_vec());
            Ok(())
        },
    },
    Setting {
        name: "UCCL_P2P_PUBLISH",
        default: "0",
        doc: "`1` lets peers that are connected look up, by their addresses, the regions that the program publishes; others stay unknown to them",
        apply: |config, value| flag(value).map(|publish| config.publish = publish),
    },
    Setting {
        name: "UCCL_P2P_RDMA_DEV",
        default: "the nearest to the GPU; all that are up, without one",
        doc: "RDMA devices to use, with commas between them, each with a port if not all of its ports are meant: `mlx5_0,mlx5_1:1`",
        apply: |config, value| {
            let names = value.split(',').map(|name| name.trim().parse());
            config.verbs.devices =
                names.collect::<Result<_, _>>().map_err(|e: ParseDeviceNameError| e.to_string())?;
            Ok(())
        },
    },
    Setting {
        name: "UCCL_P2P_RDMA_GID_INDEX",
        default: "the best",
        doc: "Which GID of a port is used, by its place in the port's table; else RoCE v2 over IPv4 before IPv6 before link-local, first those whose interface is up, one after the other until the peer is reached",
        apply: |config, value| number(value).map(|index| config.verbs.gid_index = Some(index)),
    },
    Setting {
        name: "UCCL_P2P_RDMA_MAX_DEST_RD_ATOMIC",
        default: "16",
        doc: "RDMA reads that a queue pair answers at a time, at most as many as the device takes",
        apply: |config, value| rdma(config, value, |verbs, n| verbs.max_dest_rd_atomic = n),
    },
    Setting {
        name: "UCCL_P2P_RDMA_MAX_RD_ATOMIC",
        default: "16",
        doc: "RDMA reads that a queue pair has under way, at most as many as the device takes",
        apply: |config, value| rdma(config, value, |verbs, n| verbs.max_rd_atomic = n),
    },
    Setting {
        name: "UCCL_P2P_RDMA_PKEY_INDEX",
        default: "0",
        doc: "Which partition key of a port is used, by its place in the port's table; if that place is empty, the first key of a full member",
        apply: |config, value| rdma(config, value, |verbs, n| verbs.pkey_index = n),
    },
    Setting {
        name: "UCCL_P2P_RDMA_QPS",
        default: "4; 1 on a software device",
        doc: "Queue pairs of a connection on each RDMA device, 1 to 16",
        apply: |config, value| rdma(config, value, |verbs, n| verbs.queue_pairs = Some(n)),
    },
    Setting {
        name: "UCCL_P2P_RDMA_RETRY_COUNT",
        default: "7",
        doc: "How often an RDMA device sends again before it gives up, 0 to 7",
        apply: |config, value| rdma(config, value, |verbs, n| verbs.retries = n),
    },
    Setting {
        name: "UCCL_P2P_RDMA_SL",
        default: "0",
        doc: "Service level of RDMA packets, 0 to 15",
        apply: |config, value| rdma(config, value, |verbs, n| verbs.service_level = n),
    },
    Setting {
        name: "UCCL_P2P_RDMA_TC",
        default: "104",
        doc: "Traffic class of RDMA packets: over RoCE v2 the byte with DSCP and ECN",
        apply: |config, value| rdma(config, value, |verbs, n| verbs.traffic_class = n),
    },
    Setting {
        name: "UCCL_P2P_RDMA_TIMEOUT",
        default: "14",
        doc: "How long an RDMA device waits for an acknowledgement: 4.096 us times two to the power of this, 1 to 31",
        apply: |config, value| rdma(config, value, |verbs, n| verbs.timeout = n),
    },
    Setting {
        name: "UCCL_P2P_SPIN_US",
        default: "100",
        doc: "Microseconds that a thread spins for more work before it sleeps; a worker at most 10 where there are fewer than four processors",
        apply: |config, value| number(value).map(|us| config.spin = Duration::from_micros(us)),
    },
    Setting {
        name: "UCCL_P2P_TCP_CONGESTION",
        default: "the system's; cubic on loopback",
        doc: "TCP congestion control",
        apply: |config, value| {
            config.tcp_congestion = Some(value.to_owned());
            Ok(())
        },
    },
    Setting {
        name: "UCCL_P2P_TCP_STREAMS",
        default: "chosen",
        doc: "TCP streams of a connection, 1 to 63",
        apply: |config, value| match number(value)? {
            n @ 0..=63 => {
                config.tcp_streams = n;
                Ok(())
            }
            _ => Err("at most 63".into()),
        },
    },
    Setting {
        name: "UCCL_P2P_TIMEOUT_MS",
        default: "10000",
        doc: "Milliseconds after which a silent peer that something waits for is lost, and a connect fails; 0 waits for ever",
        apply: |config, value| number(value).map(|ms| config.timeout = Duration::from_millis(ms)),
    },
    Setting {
        name: "UCCL_P2P_TRANSFER_TIMEOUT_MS",
        default: "600000",
        doc: "Deadline in milliseconds of a transfer, and of accept, that names none; 0 waits for ever",
        apply: |config, value| {
            number(value).map(|ms| config.transfer_timeout = Duration::from_millis(ms))
        },
    },
    Setting {
        name: "UCCL_P2P_TRANSPORT",
        default: "auto",
        doc: "Which links may be used: `auto` (the best that both sides have), `local` (same-host memory), `tcp`, `verbs` (RDMA; also `ib`), `libfabric`, and of its providers `cxi` and `efa`; `udp` (where both ask for it; data that does not get through goes over TCP); `fifo` (named pipes between processes of a host that both ask for them: the example of a link). All but `auto` and `udp` mean that link or nothing",
        apply: |config, value| {
            config.transport = value.parse()?;
            Ok(())
        },
    },
    Setting {
        name: "UCCL_RCMODE",
        default: "1",
        doc: "`0` sends RDMA writes over unreliable connections (UC), which this library makes reliable; reads take reliable ones (RC) all the same. Only for networks that keep the packets of a flow in order, so without adaptive routing or packet spraying: a device that sees one come late, or has no UC, goes on with RC and says so",
        apply: |config, value| flag(value).map(|rc| config.verbs.rc_mode = rc),
    },
    Setting {
        name: "UCCL_SOCKET_IFNAME",
        default: "as routes suggest",
        doc: "Network interfaces, written as in `UCCL_IB_HCA`: peers are told an address of one of them, unless `UCCL_P2P_BIND` says which",
        apply: |config, value| {
            config.interfaces = Some(value.parse()?);
            Ok(())
        },
    },
];

/// Settings that the environment cannot change, because they differ between the endpoints of a
/// process.
pub(super) const PER_ENDPOINT: &[Setting] = &[
    Setting {
        name: "gpu_index",
        default: "0",
        doc: "The GPU that the endpoint serves",
        apply: |config, value| number(value).map(|index| config.gpu_index = index),
    },
    Setting {
        name: "port",
        default: "the base port plus the GPU's index if free, else any",
        doc: "The port to listen on; 0 takes any",
        apply: |config, value| number(value).map(|port| config.port = Some(port)),
    },
];

fn number<T: FromStr>(value: &str) -> Result<T, String> {
    value.parse().map_err(|_| "not a number in range".to_owned())
}

/// Sets one of the numbers for RDMA verbs, which check their values themselves.
fn rdma<T: FromStr>(
    config: &mut Config,
    value: &str,
    set: impl FnOnce(&mut VerbsSettings, T),
) -> Result<(), String> {
    let mut verbs = config.verbs.clone();
    set(&mut verbs, number(value)?);
    verbs.validate().map_err(|e| e.to_string())?;
    config.verbs = verbs;
    Ok(())
}

/// Sets one of the numbers for libfabric.
fn fabric(
    config: &mut Config,
    value: &str,
    set: impl FnOnce(&mut LibfabricSettings, usize),
) -> Result<(), String> {
    let mut fabric = config.libfabric.clone();
    set(&mut fabric, number(value)?);
    fabric.validate().map_err(|e| e.to_string())?;
    config.libfabric = fabric;
    Ok(())
}

fn flag(value: &str) -> Result<bool, String> {
    match value {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err("use 0 or 1".into()),
    }
}
