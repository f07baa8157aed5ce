//! Compares the layouts and the constants with the installed libibverbs header.

use std::{
    mem::{offset_of, size_of},
    process::Command,
};

use super::*;

/// A fact that the header must agree with: a C expression, and its value here.
struct Fact {
    c: String,
    here: u64,
}

/// The size of a struct that is declared in full here, and the offsets of the named fields.
macro_rules! layout {
    (
        $facts:ident, $c:literal = $rust:ty, $size:tt,
        { $( $field:ident $(= $path:literal)? ),* $(,)? }
    ) => {
        layout!(@size $facts, $c, $rust, $size);
        $( {
            let path = layout!(@path $field $($path)?);
            let here = offset_of!($rust, $field) as u64;
            $facts.push(Fact { c: format!("offsetof(struct {}, {path})", $c), here });
        } )*
    };
    (@size $facts:ident, $c:literal, $rust:ty, whole) => {
        $facts.push(Fact {
            c: format!("sizeof(struct {})", $c),
            here: size_of::<$rust>() as u64,
        });
    };
    (@size $facts:ident, $c:literal, $rust:ty, part) => {};
    (@path $field:ident) => { stringify!($field) };
    (@path $field:ident $path:literal) => { $path };
}

macro_rules! numbers {
    ($facts:ident, { $( $c:ident = $here:expr ),* $(,)? }) => {
        $( $facts.push(Fact { c: stringify!($c).to_owned(), here: $here as u64 }); )*
    };
}

fn facts() -> Vec<Fact> {
    let mut facts = Vec::new();
    objects(&mut facts);
    attributes(&mut facts);
    requests(&mut facts);
    constants(&mut facts);
    facts
}

fn objects(facts: &mut Vec<Fact>) {
    layout!(facts, "ibv_device" = Device, whole, {
        node_type, transport_type, name, dev_name, dev_path, ibdev_path,
    });
    layout!(facts, "ibv_context_ops" = ContextOps, whole, {
        poll_cq, req_notify_cq, post_send, post_recv,
    });
    layout!(facts, "ibv_context" = Context, part, {
        device, ops, cmd_fd, async_fd, num_comp_vectors,
    });
    layout!(facts, "ibv_mr" = Mr, whole, { context, pd, addr, length, handle, lkey, rkey });
    layout!(facts, "ibv_comp_channel" = CompChannel, whole, { context, fd, refcnt });
    layout!(facts, "ibv_cq" = Cq, part, { context, channel, cq_context, handle, cqe });
    layout!(facts, "ibv_qp" = Qp, part, {
        context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num,
    });
    layout!(facts, "ibv_async_event" = AsyncEvent, whole, { element, event_type });
}

fn attributes(facts: &mut Vec<Fact>) {
    layout!(facts, "ibv_device_attr" = DeviceAttr, whole, {
        fw_ver, node_guid, sys_image_guid, max_mr_size, page_size_cap, vendor_id, vendor_part_id,
        hw_ver, max_qp, max_qp_wr, device_cap_flags, max_sge, max_sge_rd, max_cq, max_cqe, max_mr,
        max_pd, max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom, max_pkeys,
        local_ca_ack_delay, phys_port_cnt,
    });
    layout!(facts, "ibv_port_attr" = PortAttr, whole, {
        state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz, bad_pkey_cntr,
        qkey_viol_cntr, pkey_tbl_len, lid, sm_lid, lmc, max_vl_num, sm_sl, subnet_timeout,
        init_type_reply, active_width, active_speed, phys_state, link_layer, flags,
    });
    layout!(facts, "ibv_qp_cap" = QpCap, whole, {
        max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data,
    });
    layout!(facts, "ibv_qp_init_attr" = QpInitAttr, whole, {
        qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all,
    });
    layout!(facts, "ibv_global_route" = GlobalRoute, whole, {
        dgid, flow_label, sgid_index, hop_limit, traffic_class,
    });
    layout!(facts, "ibv_ah_attr" = AhAttr, whole, {
        grh, dlid, sl, src_path_bits, static_rate, is_global, port_num,
    });
    layout!(facts, "ibv_qp_attr" = QpAttr, whole, {
        qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num,
        qp_access_flags, cap, ah_attr, alt_ah_attr, pkey_index, alt_pkey_index,
        en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer,
        port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout, rate_limit,
    });
}

fn requests(facts: &mut Vec<Fact>) {
    layout!(facts, "ibv_wc" = Wc, whole, {
        wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags,
        pkey_index, slid, sl, dlid_path_bits,
    });
    layout!(facts, "ibv_sge" = Sge, whole, { addr, length, lkey });
    layout!(facts, "ibv_send_wr" = SendWr, whole, {
        wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data,
        remote_addr = "wr.rdma.remote_addr", rkey = "wr.rdma.rkey",
        _qp_type = "qp_type", _bind_mw = "bind_mw",
    });
    layout!(facts, "ibv_recv_wr" = RecvWr, whole, { wr_id, next, sg_list, num_sge });
}

fn constants(facts: &mut Vec<Fact>) {
    numbers!(facts, {
        IBV_TRANSPORT_IB = TRANSPORT_IB, IBV_TRANSPORT_IWARP = TRANSPORT_IWARP,
        IBV_PORT_ACTIVE = PORT_ACTIVE, IBV_PORT_ACTIVE_DEFER = PORT_ACTIVE_DEFER,
        IBV_LINK_LAYER_ETHERNET = LINK_LAYER_ETHERNET,
        IBV_EVENT_DEVICE_FATAL = event::DEVICE_FATAL, IBV_EVENT_PORT_ERR = event::PORT_ERR,
        IBV_EVENT_PORT_ACTIVE = event::PORT_ACTIVE,
        IBV_WC_SUCCESS = wc_status::SUCCESS, IBV_WC_LOC_LEN_ERR = wc_status::LOC_LEN_ERR,
        IBV_WC_LOC_PROT_ERR = wc_status::LOC_PROT_ERR,
        IBV_WC_WR_FLUSH_ERR = wc_status::WR_FLUSH_ERR,
        IBV_WC_REM_INV_REQ_ERR = wc_status::REM_INV_REQ_ERR,
        IBV_WC_REM_ACCESS_ERR = wc_status::REM_ACCESS_ERR,
        IBV_WC_REM_OP_ERR = wc_status::REM_OP_ERR,
        IBV_WC_RETRY_EXC_ERR = wc_status::RETRY_EXC_ERR,
        IBV_WC_RNR_RETRY_EXC_ERR = wc_status::RNR_RETRY_EXC_ERR,
        IBV_WC_FATAL_ERR = wc_status::FATAL_ERR,
        IBV_WR_RDMA_WRITE = wr_opcode::RDMA_WRITE, IBV_WR_RDMA_READ = wr_opcode::RDMA_READ,
        IBV_SEND_SIGNALED = send_flag::SIGNALED, IBV_SEND_INLINE = send_flag::INLINE,
        IBV_QPT_RC = qp_type::RC, IBV_QPT_UC = qp_type::UC,
        IBV_WR_RDMA_WRITE_WITH_IMM = wr_opcode::RDMA_WRITE_WITH_IMM, IBV_WR_SEND = wr_opcode::SEND,
        IBV_WC_RECV = wc_opcode::RECV, IBV_WC_RECV_RDMA_WITH_IMM = wc_opcode::RECV_RDMA_WITH_IMM,
        IBV_QPS_INIT = qp_state::INIT, IBV_QPS_RTR = qp_state::RTR, IBV_QPS_RTS = qp_state::RTS,
        IBV_QPS_ERR = qp_state::ERR,
        IBV_QP_STATE = qp_mask::STATE, IBV_QP_ACCESS_FLAGS = qp_mask::ACCESS_FLAGS,
        IBV_QP_PKEY_INDEX = qp_mask::PKEY_INDEX, IBV_QP_PORT = qp_mask::PORT,
        IBV_QP_AV = qp_mask::AV, IBV_QP_PATH_MTU = qp_mask::PATH_MTU,
        IBV_QP_TIMEOUT = qp_mask::TIMEOUT, IBV_QP_RETRY_CNT = qp_mask::RETRY_CNT,
        IBV_QP_RNR_RETRY = qp_mask::RNR_RETRY, IBV_QP_RQ_PSN = qp_mask::RQ_PSN,
        IBV_QP_MAX_QP_RD_ATOMIC = qp_mask::MAX_RD_ATOMIC,
        IBV_QP_MIN_RNR_TIMER = qp_mask::MIN_RNR_TIMER, IBV_QP_SQ_PSN = qp_mask::SQ_PSN,
        IBV_QP_MAX_DEST_RD_ATOMIC = qp_mask::MAX_DEST_RD_ATOMIC,
        IBV_QP_DEST_QPN = qp_mask::DEST_QPN,
        IBV_ACCESS_LOCAL_WRITE = access::LOCAL_WRITE,
        IBV_ACCESS_REMOTE_WRITE = access::REMOTE_WRITE,
        IBV_ACCESS_REMOTE_READ = access::REMOTE_READ,
        IBV_ACCESS_RELAXED_ORDERING = access::RELAXED_ORDERING,
    });
}

/// A C program that ends with 0 if all facts hold, and names those that do not.
fn program(header: &str, facts: &[Fact]) -> String {
    let mut text = format!(
        "#include <{header}>\n#include <stddef.h>\n#include <stdio.h>\n\
         int main(void) {{\n  int wrong = 0;\n",
    );
    for Fact { c, here } in facts {
        text += &format!(
            "  if ((unsigned long long)({c}) != {here}ull) {{ wrong = 1; \
             printf(\"%s is %llu, not {here}\\n\", \"{c}\", (unsigned long long)({c})); }}\n"
        );
    }
    text + "  return wrong;\n}\n"
}

#[test]
fn layouts_are_those_of_the_header() {
    let facts = facts();
    assert!(facts.len() > 200, "only {} facts", facts.len());
    compare("infiniband/verbs.h", "libibverbs-dev", &facts);
}

fn compare(header: &str, package: &str, facts: &[Fact]) {
    let folder = tempfile::tempdir().expect("a folder");
    let (source, binary) = (folder.path().join("check.c"), folder.path().join("check"));
    let compile = |text: &str| {
        std::fs::write(&source, text).expect("a file");
        Command::new("cc").arg("-o").arg(&binary).arg(&source).output()
    };
    match compile(&format!("#include <{header}>\nint main(void) {{ return 0; }}\n")) {
        Err(_) => return eprintln!("skipped: lacks a C compiler (cc)"),
        Ok(output) if !output.status.success() => {
            return eprintln!("skipped: lacks {header} ({package})");
        }
        Ok(_) => {}
    }
    let output = compile(&program(header, facts)).expect("a compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let ran = Command::new(&binary).output().expect("the program");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stdout));
}
