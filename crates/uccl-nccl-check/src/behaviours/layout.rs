//! Tables without gaps, and properties that NCCL takes.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, bail, ensure};

use crate::{
    library::{NetTable, with_table},
    net::{Net, Properties},
    rank::Rank,
};

/// The longest message that NCCL takes a network for: 1 TiB.
const LONGEST: u64 = 1 << 40;
const HOST: i32 = 0;
const UNPACK: i32 = 1;

pub(super) fn layout(rank: &mut Rank) -> Result<String> {
    let library = rank.library.as_ref().context("the library is loaded")?;
    let (mut names, mut known) = (BTreeSet::new(), None::<Vec<Properties>>);
    let tables = library.nets();
    for table in &tables {
        let version = table.version();
        let place = || format!("v{version}");
        names.insert(table.name().context("the name is null").with_context(place)?);
        functions(*table).with_context(place)?;
        let found = devices(*table).with_context(place)?;
        for one in &found {
            valid(one).with_context(|| format!("v{version}, device {}", one.name))?;
        }
        match &known {
            None => known = Some(found),
            Some(known) => same(known, &found).with_context(place)?,
        }
    }
    ensure!(names.len() <= 1, "the versions have different names: {names:?}");
    let devices = known.unwrap_or_default();
    for device in &devices {
        let alike = devices.iter().filter(|other| other.name == device.name).count();
        ensure!(alike == 1, "two devices are named {}", device.name);
    }
    let listed: Vec<_> = devices
        .iter()
        .map(|device| format!("{} ({} Mbit/s)", device.name, device.speed_mbps))
        .collect();
    let name = names.pop_first().unwrap_or_default();
    Ok(format!("{} tables of {name}; devices: {}", tables.len(), listed.join(", ")))
}

/// Fails if a function is missing that NCCL calls without a look.
fn functions(table: NetTable) -> Result<()> {
    let needed = with_table!(table, table => [
        ("init", table.init.is_some()),
        ("devices", table.devices.is_some()),
        ("getProperties", table.get_properties.is_some()),
        ("listen", table.listen.is_some()),
        ("connect", table.connect.is_some()),
        ("accept", table.accept.is_some()),
        ("regMr", table.reg_mr.is_some()),
        ("deregMr", table.dereg_mr.is_some()),
        ("isend", table.isend.is_some()),
        ("irecv", table.irecv.is_some()),
        ("iflush", table.iflush.is_some()),
        ("test", table.test.is_some()),
        ("closeSend", table.close_send.is_some()),
        ("closeRecv", table.close_recv.is_some()),
        ("closeListen", table.close_listen.is_some()),
    ]);
    for (name, is_there) in needed {
        ensure!(is_there, "{name} is null");
    }
    let finalizes = match table {
        NetTable::V11(table) => table.finalize.is_some(),
        NetTable::V12(table) => table.finalize.is_some(),
        _ => true,
    };
    ensure!(finalizes, "finalize is null");
    Ok(())
}

fn devices(table: NetTable) -> Result<Vec<Properties>> {
    let net = Net::new(table);
    let context = net.init(1)?;
    let count = net.devices()?;
    ensure!(count > 0, "there is no device: NCCL passes the plugin over");
    let found = (0..count).map(|device| net.properties(device)).collect::<Result<_>>()?;
    net.finalize(context)?;
    Ok(found)
}

fn valid(device: &Properties) -> Result<()> {
    match (device.device_type, device.device_version) {
        (HOST, _) | (UNPACK, 7) => {}
        (kind, version) => bail!("NCCL does not use a network of type {kind}, version {version}"),
    }
    ensure!(device.memory & 1 != 0, "ptrSupport {} lacks the host's memory", device.memory);
    ensure!(device.max_comms > 0, "maxComms is {}", device.max_comms);
    ensure!((1..=8).contains(&device.max_recvs), "maxRecvs is {}", device.max_recvs);
    ensure!(device.latency_us >= 0.0, "the latency is {} us", device.latency_us);
    ensure!(
        device.speed_mbps > 0,
        "the speed is {}: NCCL calculates with 10 Gbit/s",
        device.speed_mbps
    );
    for longest in device.longest_bytes.into_iter().flatten() {
        ensure!(longest > 0 && longest <= LONGEST, "a longest message of {longest} bytes");
    }
    if let Some(path) = &device.pci_path {
        ensure!(path.starts_with("/sys/"), "pciPath is {path}, no folder in /sys");
    }
    Ok(())
}

/// Fails if two versions tell different things of the devices.
fn same(one: &[Properties], other: &[Properties]) -> Result<()> {
    ensure!(
        one.len() == other.len(),
        "{} devices, and {} in another version",
        other.len(),
        one.len()
    );
    for (one, other) in one.iter().zip(other) {
        // Fields that only one of the versions has are not compared.
        let mut seen = one.clone();
        if seen.physical.is_empty() || other.physical.is_empty() {
            seen.physical.clone_from(&other.physical);
        }
        if seen.longest_bytes.is_none() || other.longest_bytes.is_none() {
            seen.longest_bytes = other.longest_bytes;
        }
        ensure!(seen == *other, "{other:?}, and in another version {one:?}");
    }
    Ok(())
}
