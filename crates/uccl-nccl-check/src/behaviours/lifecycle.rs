//! Begin and end of communicators, and of the library.

use std::{env, fs};

use anyhow::{Context as _, Result, ensure};

use crate::{
    library::Library,
    net::Net,
    rank::{NotApplicable, Rank, Registration},
    threads,
};

/// How often the library is loaded.
const LOADS: usize = 100;
/// Rounds in search of leaks, and the first of them that is compared.
const ROUNDS: usize = 20;
const WARM: usize = 4;

pub(super) fn contexts(rank: &mut Rank) -> Result<String> {
    let net = Net::new(rank.table()?);
    for first_ends_first in [true, false] {
        let one = net.init(1)?;
        ensure!(net.devices()? > 0, "there is no device");
        let other = net.init(2)?;
        let (first, second) = if first_ends_first { (one, other) } else { (other, one) };
        net.finalize(first)?;
        // The other one still works.
        let (_, listen) = net.listen(second, 0)?;
        net.close_listen(listen)?;
        net.finalize(second)?;
    }
    rank.check_times(&net)?;
    Ok("two contexts, both orders".into())
}

/// Variables that name interfaces.
const INTERFACES: [&str; 2] = ["NCCL_SOCKET_IFNAME", "UCCL_SOCKET_IFNAME"];

pub(super) fn init_again(rank: &mut Rank) -> Result<String> {
    let net = Net::new(rank.table()?);
    let before = INTERFACES.map(env::var_os);
    for name in INTERFACES {
        // SAFETY: the plugin has not begun, so that this process has one thread.
        unsafe { env::set_var(name, "=nosuchif0") };
    }
    let refused = match net.init(1) {
        Err(_) => true,
        Ok(context) => {
            let refused = !matches!(net.devices(), Ok(1..));
            net.finalize(context)?;
            refused
        }
    };
    for (name, value) in INTERFACES.into_iter().zip(before) {
        // SAFETY: a plugin that had no device has no thread either.
        unsafe {
            match value {
                Some(value) => env::set_var(name, value),
                None => env::remove_var(name),
            }
        }
    }
    if !refused {
        let reason = "it has devices whatever NCCL_SOCKET_IFNAME says: no init could be made fail";
        return Err(NotApplicable(reason.into()).into());
    }
    let context = net.init(2).context("init after one that failed")?;
    ensure!(net.devices()? > 0, "no device after an init that failed");
    net.finalize(context)?;
    Ok("an init without interfaces, then one with".into())
}

pub(super) fn reload(rank: &mut Rank) -> Result<String> {
    let path = rank.job.library.clone();
    let ends = rank.job.version >= 11;
    for load in 0..LOADS {
        let library = match rank.library.take() {
            Some(library) => library,
            None => Library::open(&path)?,
        };
        rank.library = Some(library);
        let net = Net::new(rank.table()?);
        let context = net.init(load as u64)?;
        ensure!(net.devices()? > 0, "there is no device");
        let (_, listen) = net.listen(context, 0)?;
        net.close_listen(listen)?;
        net.finalize(context)?;
        let threads = threads::count()?;
        ensure!(
            !ends || threads == 1,
            "after finalize there are {} threads of the plugin: its code is unloaded under them",
            threads - 1
        );
        let library = rank.library.take().context("the library is loaded")?;
        // SAFETY: the tables are not used any more.
        unsafe { library.close() }?;
    }
    Ok(format!("{LOADS} times"))
}

pub(super) fn leaks(rank: &mut Rank) -> Result<String> {
    let mut before = None;
    for round in 0..ROUNDS {
        let started = rank.start()?;
        for connector in [0, 1] {
            let comm = rank.one_way(&started, connector, 1 - connector)?;
            let memory = Registration::new(&started, comm, 100_000)?;
            started.pass(comm, memory.all())?;
            memory.end(&started)?;
            rank.meet()?;
            started.net.close(comm)?;
        }
        rank.meet()?;
        rank.finish(started)?;
        let now = (threads::count()?, descriptors()?);
        if round == WARM {
            before = Some((now, mappings()?));
        }
        rank.meet()?;
    }
    let ((threads_then, files_then), maps_then) = before.context("a round that is compared")?;
    let (threads, files, maps) = (threads::count()?, descriptors()?, mappings()?);
    ensure!(threads <= threads_then, "{threads} threads, and {threads_then} earlier");
    ensure!(files <= files_then, "{files} descriptors, and {files_then} earlier");
    // The allocator may have mapped more; a leak of each round is more than that.
    let limit = maps_then + (ROUNDS - WARM) / 2;
    ensure!(maps <= limit, "{maps} mappings, and {maps_then} earlier");
    Ok(format!("{ROUNDS} rounds: {threads} threads, {files} descriptors, {maps} mappings"))
}

fn descriptors() -> Result<usize> {
    entries("/proc/self/fd")
}

fn mappings() -> Result<usize> {
    Ok(fs::read_to_string("/proc/self/maps").context("/proc/self/maps")?.lines().count())
}

fn entries(folder: &str) -> Result<usize> {
    Ok(fs::read_dir(folder).with_context(|| folder.to_owned())?.count())
}
