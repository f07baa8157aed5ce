//! Tables without gaps; begin and end.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use uccl_nccl_abi::rma::PROXY_DEVICE;

use crate::{
    group::Plugin,
    rank::{NotApplicable, Rank},
    rma::Rma,
    threads,
};

/// Rounds in search of leaks, and the first of them that is compared.
const ROUNDS: usize = 8;
const WARM: usize = 3;

pub(crate) fn layout(rank: &mut Rank) -> Result<String> {
    let table = rank.rma_table()?;
    let name = table.name().context("the name is null")?;
    for (function, is_there) in table.needed() {
        ensure!(is_there, "{function} is null");
    }
    let rma = Rma::new(table);
    let context = rma.init(1).map_err(|error| {
        NotApplicable(format!("NCCL passes the one-sided tables over: {error:#}"))
    })?;
    let count = rma.devices()?;
    ensure!(count > 0, "there is no device: NCCL passes the plugin over");
    for device in 0..count {
        let found = rma.properties(device)?;
        let kind = found.device_type;
        ensure!(kind == PROXY_DEVICE, "the device's type is {kind}, and that of a proxy is 2");
        ensure!(found.max_recvs > 0, "maxRecvs is {}: it bounds requests", found.max_recvs);
        ensure!(found.memory & 1 != 0, "ptrSupport {} lacks the host's memory", found.memory);
    }
    rma.finalize(context)?;
    Ok(format!("v{} of {name}; devices: {count}", table.version()))
}

pub(crate) fn ends(rank: &mut Rank) -> Result<String> {
    for first_ends_first in [true, false] {
        let (one, other) = (Plugin::start(rank, 1)?, Plugin::start(rank, 2)?);
        let (first, second) = if first_ends_first { (one, other) } else { (other, one) };
        first.finish(rank)?;
        // The other one still works.
        second.join(rank, &[0, 1], 1)?.close(&[])?;
        second.finish(rank)?;
    }
    let mut before = None;
    for round in 0..ROUNDS {
        let plugin = Plugin::start(rank, 3)?;
        let mut group = plugin.join(rank, &[0, 1], 4)?;
        let room = group.register(4096)?;
        rank.meet()?;
        group.close(&[&room])?;
        plugin.finish(rank)?;
        rank.meet()?;
        let threads = threads::count()?;
        ensure!(threads == 1, "after finalize {} threads of the plugin are left", threads - 1);
        if round == WARM {
            before = Some(descriptors()?);
        }
    }
    let (before, now) = (before.context("a round that is compared")?, descriptors()?);
    let (count, earlier) = (now.len(), before.len());
    // A thread may keep one to sleep on; a leak of each round is more than that.
    let limit = earlier + (ROUNDS - WARM) / 2;
    ensure!(count <= limit, "{count} descriptors, and {earlier} earlier: {now:?}, {before:?}");
    Ok(format!("contexts in both orders, {ROUNDS} rounds, {count} descriptors"))
}

/// The targets of this process's descriptors.
fn descriptors() -> Result<Vec<String>> {
    let mut targets = Vec::new();
    for entry in fs::read_dir("/proc/self/fd").context("/proc/self/fd")? {
        // That of the folder itself is gone by now.
        if let Ok(target) = fs::read_link(entry?.path()) {
            targets.push(target.display().to_string());
        }
    }
    Ok(targets)
}
