//! Checks that our structs are laid out like those in the installed headers.
//!
//! A small C program prints the offset of each field. Newer headers have more fields. Structs that
//! we allocate must then be at least as long; structs that the library allocates are read only as
//! far as we know them.

use std::{fs, mem::offset_of, path::Path, process::Command};

use super::raw;

/// A field of a C struct, and its offset in ours.
struct Field {
    c: &'static str,
    at: usize,
}

struct Layout {
    c: &'static str,
    size: usize,
    /// We allocate it, so it must be as long as the header's.
    is_ours: bool,
    fields: Vec<Field>,
}

macro_rules! layout {
    ($rust:ty, $c:literal, $is_ours:literal, $($field:ident $(= $name:literal)?),* $(,)?) => {
        Layout {
            c: $c,
            size: size_of::<$rust>(),
            is_ours: $is_ours,
            fields: vec![$(Field {
                c: layout!(@name $field $($name)?),
                at: offset_of!($rust, $field),
            }),*],
        }
    };
    (@name $field:ident) => { stringify!($field) };
    (@name $field:ident $name:literal) => { $name };
}

fn infos() -> Vec<Layout> {
    vec![
        layout!(
            raw::Info,
            "struct fi_info",
            false,
            next,
            caps,
            mode,
            addr_format,
            src_addrlen,
            dest_addrlen,
            src_addr,
            dest_addr,
            handle,
            tx_attr,
            rx_attr,
            ep_attr,
            domain_attr,
            fabric_attr,
            nic,
        ),
        layout!(
            raw::TxAttr,
            "struct fi_tx_attr",
            false,
            caps,
            mode,
            op_flags,
            msg_order,
            comp_order,
            inject_size,
            size,
            iov_limit,
            rma_iov_limit,
            tclass,
        ),
        layout!(
            raw::RxAttr,
            "struct fi_rx_attr",
            false,
            caps,
            mode,
            op_flags,
            msg_order,
            comp_order,
            total_buffered_recv,
            size,
            iov_limit,
        ),
        layout!(
            raw::EpAttr,
            "struct fi_ep_attr",
            false,
            kind = "type",
            protocol,
            protocol_version,
            max_msg_size,
        ),
        layout!(
            raw::DomainAttr,
            "struct fi_domain_attr",
            false,
            domain,
            name,
            threading,
            control_progress,
            data_progress,
            resource_mgmt,
            av_type,
            mr_mode,
            mr_key_size,
            cq_data_size,
            cq_cnt,
        ),
        layout!(
            raw::FabricAttr,
            "struct fi_fabric_attr",
            false,
            fabric,
            name,
            prov_name,
            prov_version,
            api_version,
        ),
        layout!(
            raw::Nic,
            "struct fid_nic",
            false,
            fid,
            device_attr,
            bus_attr,
            link_attr,
            prov_attr,
        ),
        layout!(raw::BusAttr, "struct fi_bus_attr", false, kind = "bus_type", pci = "attr.pci"),
        layout!(
            raw::PciAttr,
            "struct fi_pci_attr",
            false,
            domain_id,
            bus_id,
            device_id,
            function_id,
        ),
        layout!(
            raw::LinkAttr,
            "struct fi_link_attr",
            false,
            address,
            mtu,
            speed,
            state,
            network_type,
        ),
    ]
}

fn objects() -> Vec<Layout> {
    vec![
        layout!(raw::Fid, "struct fid", false, class = "fclass", context, ops),
        layout!(raw::Ops, "struct fi_ops", false, size, close, bind, control),
        layout!(raw::Fabric, "struct fid_fabric", false, fid, ops, api_version),
        layout!(
            raw::FabricOps,
            "struct fi_ops_fabric",
            false,
            size,
            domain,
            passive_ep,
            eq_open,
            wait_open,
            trywait,
        ),
        layout!(raw::Domain, "struct fid_domain", false, fid, ops, mr),
        layout!(raw::DomainOps, "struct fi_ops_domain", false, size, av_open, cq_open, endpoint,),
        layout!(raw::MrOps, "struct fi_ops_mr", false, size, reg, regv, regattr),
        layout!(raw::Mr, "struct fid_mr", false, fid, mem_desc, key),
        layout!(raw::Av, "struct fid_av", false, fid, ops),
        layout!(raw::AvOps, "struct fi_ops_av", false, size, insert),
        layout!(raw::Cq, "struct fid_cq", false, fid, ops),
        layout!(
            raw::CqOps,
            "struct fi_ops_cq",
            false,
            size,
            read,
            readfrom,
            readerr,
            sread,
            sreadfrom,
            signal,
            strerror,
        ),
        layout!(raw::Ep, "struct fid_ep", false, fid, ops, cm, msg, rma),
        layout!(raw::EpOps, "struct fi_ops_ep", false, size, cancel, getopt, setopt),
        layout!(raw::CmOps, "struct fi_ops_cm", false, size, setname, getname),
        layout!(
            raw::RmaOps,
            "struct fi_ops_rma",
            false,
            size,
            read,
            readv,
            readmsg,
            write,
            writev,
            writemsg,
        ),
    ]
}

fn arguments() -> Vec<Layout> {
    vec![
        layout!(
            raw::MrAttr,
            "struct fi_mr_attr",
            true,
            mr_iov,
            iov_count,
            access,
            offset,
            requested_key,
            context,
            auth_key_size,
            auth_key,
            iface,
            device,
        ),
        layout!(raw::MrRawAttr, "struct fi_mr_raw_attr", true, flags, base_addr, raw_key, key_size,),
        layout!(
            raw::MrMapRaw,
            "struct fi_mr_map_raw",
            true,
            flags,
            base_addr,
            raw_key,
            key_size,
            key,
        ),
        layout!(
            raw::AvAttr,
            "struct fi_av_attr",
            true,
            kind = "type",
            rx_ctx_bits,
            count,
            ep_per_node,
            name,
            map_addr,
            flags,
        ),
        layout!(
            raw::CqAttr,
            "struct fi_cq_attr",
            true,
            size,
            flags,
            format,
            wait_obj,
            signaling_vector,
            wait_cond,
            wait_set,
        ),
        layout!(raw::CqEntry, "struct fi_cq_entry", true, op_context),
        layout!(
            raw::CqErrEntry,
            "struct fi_cq_err_entry",
            true,
            op_context,
            flags,
            len,
            buf,
            data,
            tag,
            olen,
            err,
            prov_errno,
            err_data,
            err_data_size,
        ),
        layout!(
            raw::MsgRma,
            "struct fi_msg_rma",
            true,
            msg_iov,
            desc,
            iov_count,
            addr,
            rma_iov,
            rma_iov_count,
            context,
            data,
        ),
        layout!(raw::RmaIov, "struct fi_rma_iov", true, addr, len, key),
        Layout {
            c: "struct fi_context2",
            size: size_of::<raw::Context>(),
            is_ours: true,
            fields: Vec::new(),
        },
    ]
}

/// Our constants, with their names in C.
macro_rules! numbers {
    ($($name:ident),* $(,)?) => { [$((stringify!($name), raw::$name as i128)),*] };
}

fn all_numbers() -> Vec<(&'static str, i128)> {
    numbers![
        FI_MSG,
        FI_RMA,
        FI_TAGGED,
        FI_ATOMIC,
        FI_READ,
        FI_WRITE,
        FI_RECV,
        FI_TRANSMIT,
        FI_REMOTE_READ,
        FI_REMOTE_WRITE,
        FI_MORE,
        FI_COMPLETION,
        FI_DELIVERY_COMPLETE,
        FI_HMEM,
        FI_LOCAL_COMM,
        FI_REMOTE_COMM,
        FI_RMA_EVENT,
        FI_CONTEXT,
        FI_RX_CQ_DATA,
        FI_CONTEXT2,
        FI_MR_LOCAL,
        FI_MR_RAW,
        FI_MR_VIRT_ADDR,
        FI_MR_ALLOCATED,
        FI_MR_PROV_KEY,
        FI_MR_RMA_EVENT,
        FI_MR_ENDPOINT,
        FI_MR_HMEM,
        FI_OPT_ENDPOINT,
        FI_EP_MSG,
        FI_EP_DGRAM,
        FI_EP_RDM,
        FI_THREAD_SAFE,
        FI_THREAD_DOMAIN,
        FI_PROGRESS_AUTO,
        FI_PROGRESS_MANUAL,
        FI_RM_ENABLED,
        FI_SOCKADDR,
        FI_SOCKADDR_IN,
        FI_SOCKADDR_IN6,
        FI_ADDR_STR,
        FI_BUS_PCI,
        FI_LINK_DOWN,
        FI_GETWAIT,
        FI_ENABLE,
        FI_GET_RAW_MR,
        FI_MAP_RAW_MR,
        FI_UNMAP_KEY,
        FI_WAIT_NONE,
        FI_WAIT_FD,
        FI_CQ_FORMAT_CONTEXT,
        FI_HMEM_SYSTEM,
        FI_HMEM_CUDA,
        FI_ADDR_NOTAVAIL,
        FI_EOTHER,
        FI_ETOOSMALL,
        FI_EAVAIL,
        FI_ENOKEY,
    ]
    .to_vec()
}

#[test]
fn structs_and_numbers_are_those_of_the_installed_headers() {
    let include = Path::new("/usr/include/rdma/fabric.h");
    if !include.exists() {
        eprintln!("skipped: lacks rdma/fabric.h (Debian: libfabric-dev)");
        return;
    }
    let layouts: Vec<Layout> = infos().into_iter().chain(objects()).chain(arguments()).collect();
    let folder = tempfile::tempdir().expect("a folder");
    let (source, program) = (folder.path().join("layout.c"), folder.path().join("layout"));
    fs::write(&source, program_text(&layouts)).expect("it can be written");
    let compiled = Command::new("cc").arg("-w").arg("-o").arg(&program).arg(&source).output();
    let Ok(compiled) = compiled else {
        eprintln!("skipped: lacks cc (Debian: gcc)");
        return;
    };
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let output = Command::new(&program).output().expect("it runs").stdout;
    let output = String::from_utf8(output).expect("text");
    let mut lines = output.lines();
    let mut next = || lines.next().expect("a line for each").parse::<i128>().expect("a number");
    for layout in &layouts {
        let size = next();
        let fits = !layout.is_ours || layout.size as i128 >= size;
        assert!(fits, "{} has {size} bytes in C, {} here", layout.c, layout.size);
        for field in &layout.fields {
            assert_eq!(next(), field.at as i128, "{} of {}", field.c, layout.c);
        }
    }
    for (name, ours) in all_numbers() {
        // The C program prints a number with all bits set as -1.
        assert_eq!(next() as u64, ours as u64, "{name}");
    }
    assert_eq!(lines.next(), None);
}

fn program_text(layouts: &[Layout]) -> String {
    let headers = ["fabric", "fi_domain", "fi_endpoint", "fi_eq", "fi_rma", "fi_cm", "fi_errno"];
    let mut text = String::from("#include <stddef.h>\n#include <stdio.h>\n");
    for header in headers {
        text += &format!("#include <rdma/{header}.h>\n");
    }
    text += "int main(void) {\n";
    for Layout { c, fields, .. } in layouts {
        text += &format!("printf(\"%zu\\n\", sizeof({c}));\n");
        for field in fields {
            text += &format!("printf(\"%zu\\n\", offsetof({c}, {}));\n", field.c);
        }
    }
    for (name, _) in all_numbers() {
        text += &format!("printf(\"%lld\\n\", (long long)({name}));\n");
    }
    text + "return 0;\n}\n"
}
