//! The other side, as the leading side knows it: started on this host, or reached on another.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Shutdown, TcpStream, ToSocketAddrs},
    os::unix::net::UnixStream,
    process::{Child, Command, Stdio},
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use uccl_p2p::Config;

use super::{auth::greet, control::Channel, role::Role};

/// The hidden subcommand that a spawned peer runs.
pub const SUBCOMMAND: &str = "bench-peer";

/// The other side, as the leading side knows it.
pub(crate) struct Peer {
    pub(crate) channel: Channel,
    /// Where its endpoint is reached.
    pub(crate) ip: IpAddr,
    /// Its host's name.
    pub(crate) host: String,
    /// The GPU that it uses, if it uses one.
    pub(crate) gpu: u32,
    /// The server, if this process started it.
    server: Option<LocalServer>,
}

/// A server on this host.
pub(super) enum LocalServer {
    /// Another process.
    Process(Child),
    /// A thread of this one, for as long as the socket is open.
    Thread { thread: Option<JoinHandle<Result<()>>>, socket: UnixStream },
}

impl Peer {
    pub(super) fn greeted(channel: Channel, server: LocalServer) -> Result<Self> {
        let ip = Ipv4Addr::LOCALHOST.into();
        let server = Some(server);
        let mut peer = Self { channel, ip, host: String::new(), gpu: 0, server };
        peer.host = greet(&mut peer.channel, Role::Lead, None)?;
        Ok(peer)
    }

    /// Starts one on this host.
    pub(crate) fn spawn() -> Result<Self> {
        let program =
            std::env::current_exe().context("cannot find this program to start it again")?;
        let mut child = Command::new(&program)
            .arg(SUBCOMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("the second process has no pipes");
        };
        let channel = Channel::new(stdout.into(), stdin.into());
        Self::greeted(channel, LocalServer::Process(child))
    }

    /// Reaches one that listens on another host.
    pub(crate) fn connect(addr: &str) -> Result<Self> {
        let addr = with_port(addr);
        let stream = reach(&addr).with_context(|| {
            format!(
                "cannot reach {addr}: run `uccl bench --listen` there, and let its firewall pass \
                 this port and the endpoint's (28100 and up)"
            )
        })?;
        let ip = stream.peer_addr()?.ip();
        let mut channel = Channel::over(stream)?;
        let host = greet(&mut channel, Role::Lead, Config::from_env()?.psk.as_deref())?;
        Ok(Self { channel, ip, host, gpu: 0, server: None })
    }

    /// Whether it was started from here, on this host.
    pub(crate) fn is_local(&self) -> bool {
        self.server.is_some()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        match &mut self.server {
            Some(LocalServer::Process(child)) => {
                // It ends by itself once the channel closes, but must not outlive this process if
                // it hangs.
                let _ = child.kill();
                let _ = child.wait();
            }
            Some(LocalServer::Thread { thread, socket }) => {
                let _ = socket.shutdown(Shutdown::Both);
                // The server has answered with its error, or the channel's end shows it.
                let _ = thread.take().map(JoinHandle::join);
            }
            None => {}
        }
    }
}

const DEFAULT_PORT: u16 = 28190;
/// How long one address may take to answer.
const ANSWER: Duration = Duration::from_secs(10);

/// Connects to the first of a name's addresses that answers.
fn reach(addr: &str) -> io::Result<TcpStream> {
    let mut failed = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for addr in addr.to_socket_addrs()? {
        match TcpStream::connect_timeout(&addr, ANSWER) {
            Ok(stream) => return Ok(stream),
            Err(e) => failed = io::Error::new(e.kind(), format!("{addr}: {e}")),
        }
    }
    Err(failed)
}

/// An address that names no port gets the default one.
pub(super) fn with_port(addr: &str) -> String {
    match addr.parse::<IpAddr>() {
        Ok(IpAddr::V6(ip)) => format!("[{ip}]:{DEFAULT_PORT}"),
        _ if addr.contains(':') => addr.to_owned(),
        _ => format!("{addr}:{DEFAULT_PORT}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_without_a_port_gets_one() {
        for (given, full) in [
            ("10.0.0.1", "10.0.0.1:28190"),
            ("10.0.0.1:5", "10.0.0.1:5"),
            ("node1", "node1:28190"),
            ("::1", "[::1]:28190"),
            ("[::1]:5", "[::1]:5"),
        ] {
            assert_eq!(with_port(given), full);
        }
    }
}
