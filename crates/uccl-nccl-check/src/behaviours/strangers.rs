//! Connections that are no peers'.

use std::{
    collections::BTreeSet,
    fs,
    io::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::rank::{NotApplicable, Rank, Registration};

const STRANGERS: usize = 1000;
const PATIENCE: Duration = Duration::from_secs(2);

pub(super) fn strangers(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    let comm;
    let said;
    if rank.is_first() {
        let mut handle = rank.hear_handle(1)?;
        comm = started.connect(&mut handle)?;
        said = String::new();
    } else {
        let (handle, listen) = started.net.listen(started.context, 0)?;
        let ports = own_listeners()?;
        allow_descriptors()?;
        let mut open = Vec::new();
        for at in 0..STRANGERS {
            for port in &ports {
                // A plugin may refuse them, too.
                if let Ok(mut stream) = TcpStream::connect_timeout(port, PATIENCE) {
                    let _refused = match at % 3 {
                        0 => Ok(()),
                        1 => stream.write_all(b"GET / HTTP/1.0\r\n\r\n"),
                        _ => stream.write_all(&[at as u8; 4096]),
                    };
                    open.push(stream);
                }
            }
        }
        rank.tell(0, &handle)?;
        comm = started.accept(listen)?;
        started.net.close_listen(listen)?;
        said = format!("{} strangers at {} ports", open.len(), ports.len());
    }
    let room = Registration::new(&started, comm, 1000)?;
    started.pass(comm, room.all())?;
    room.end(&started)?;
    rank.meet()?;
    started.net.close(comm)?;
    rank.finish(started)?;
    rank.tell(rank.peer(), said.as_bytes())?;
    let theirs = String::from_utf8_lossy(&rank.hear(rank.peer())?).into_owned();
    let said = if said.is_empty() { theirs } else { said };
    if said.starts_with("0 strangers") {
        return Err(NotApplicable("it listens on no TCP port".into()).into());
    }
    Ok(said)
}

pub(super) fn old_handle(rank: &mut Rank) -> Result<String> {
    let started = rank.start()?;
    let comm = if rank.is_first() {
        let mut old = rank.hear_handle(1)?;
        let mut handle = rank.hear_handle(1)?;
        let end = Instant::now() + PATIENCE / 4;
        // The connect may fail, and may go on for long: it must reach nobody.
        while Instant::now() < end {
            match started.net.connect(started.context, 0, &mut old) {
                Ok(None) => thread::yield_now(),
                Ok(Some(comm)) => {
                    started.net.close(comm)?;
                    break;
                }
                Err(_) => break,
            }
        }
        rank.meet()?;
        started.connect(&mut handle)?
    } else {
        let (old, closed) = started.net.listen(started.context, 0)?;
        started.net.close_listen(closed)?;
        let (handle, listen) = started.net.listen(started.context, 0)?;
        rank.tell(0, &old)?;
        rank.tell(0, &handle)?;
        let end = Instant::now() + PATIENCE / 4;
        while Instant::now() < end {
            let wrong = started.net.accept(listen)?;
            ensure!(wrong.is_none(), "the handle of a closed listener reaches another one");
        }
        rank.meet()?;
        let comm = started.accept(listen)?;
        started.net.close_listen(listen)?;
        comm
    };
    let room = Registration::new(&started, comm, 1000)?;
    started.pass(comm, room.all())?;
    room.end(&started)?;
    rank.meet()?;
    started.net.close(comm)?;
    rank.finish(started)?;
    Ok("a closed listener's handle".into())
}

/// Lets this process have as many descriptors as the system allows: it has both ends of each
/// stranger's connection.
fn allow_descriptors() -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
        .context("the number of descriptors")
}

/// The TCP ports that this process listens on.
fn own_listeners() -> Result<BTreeSet<SocketAddr>> {
    let mut inodes = BTreeSet::new();
    for entry in fs::read_dir("/proc/self/fd").context("/proc/self/fd")? {
        // The descriptor of this list is gone.
        let Ok(link) = fs::read_link(entry?.path()) else { continue };
        let link = link.to_string_lossy().into_owned();
        let inode = link.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']'));
        inodes.extend(inode.map(str::to_owned));
    }
    let mut found = BTreeSet::new();
    for table in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        // A kernel without IPv6 lacks the second.
        let Ok(text) = fs::read_to_string(table) else { continue };
        for line in text.lines().skip(1) {
            let words: Vec<_> = line.split_whitespace().collect();
            let (Some(local), Some(&"0A"), Some(inode)) =
                (words.get(1), words.get(3), words.get(9))
            else {
                continue;
            };
            if inodes.contains(*inode) {
                found.extend(address(local));
            }
        }
    }
    Ok(found)
}

/// An address of /proc/net/tcp, with loopback for any.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let ip = match ip.len() {
        8 => IpAddr::V4(Ipv4Addr::from(u32::from_str_radix(ip, 16).ok()?.to_ne_bytes())),
        32 => {
            let mut bytes = [0; 16];
            for (at, word) in bytes.chunks_mut(4).enumerate() {
                let value = u32::from_str_radix(ip.get(at * 8..at * 8 + 8)?, 16).ok()?;
                word.copy_from_slice(&value.to_ne_bytes());
            }
            IpAddr::V6(Ipv6Addr::from(bytes))
        }
        _ => return None,
    };
    let ip = match ip {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_listener_of_this_process_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address");
        assert!(own_listeners().expect("the list").contains(&address));
    }
}
