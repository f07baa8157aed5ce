//! The side that serves: started by the leading side on this host, or listening for one on another.

use std::{
    io,
    net::{IpAddr, TcpListener, TcpStream},
    os::{fd::AsFd, unix::net::UnixStream},
};

use anyhow::{Context, Result};
use rustix::process::{Signal, set_parent_process_death_signal};
use uccl_p2p::Config;

use super::{
    auth::greet,
    control::{Channel, Phase, Point, Reply, Request, WireAdvert},
    limits,
    peer::{LocalServer, Peer, with_port},
    place,
    role::Role,
    side::{ListeningEndpoint, PointMemory, Side},
};

impl Peer {
    /// Starts one in this process.
    pub(crate) fn start_thread() -> Result<Self> {
        let (ours, theirs) = UnixStream::pair().context("cannot make a pair of sockets")?;
        let thread = std::thread::Builder::new().name("bench-peer".into()).spawn({
            let (reader, writer) = (theirs.try_clone()?.into(), theirs.into());
            move || serve(Channel::new(reader, writer))
        });
        let thread = Some(thread.context("cannot start a thread")?);
        let channel = Channel::new(ours.try_clone()?.into(), ours.try_clone()?.into());
        Self::greeted(channel, LocalServer::Thread { thread, socket: ours })
    }
}

/// Runs as the second process of a benchmark on this host.
pub fn serve_parent() -> Result<()> {
    // Closed pipes end this process too, but not while it is stuck.
    set_parent_process_death_signal(Some(Signal::KILL)).context("cannot be tied to the parent")?;
    let reader = io::stdin().as_fd().try_clone_to_owned()?;
    let writer = io::stdout().as_fd().try_clone_to_owned()?;
    serve(Channel::new(reader, writer))
}

/// Serves the process at the other end of the channel.
fn serve(mut channel: Channel) -> Result<()> {
    greet(&mut channel, Role::Serve, None)?;
    Server::new(channel, None).serve()
}

/// Listens for leading sides and serves one after the other.
pub(crate) fn listen(addr: &str, once: bool) -> Result<()> {
    let addr = with_port(addr);
    let listener = TcpListener::bind(&addr).with_context(|| {
        format!("cannot listen on {addr}: is another one running? Take another port")
    })?;
    let psk = Config::from_env()?.psk;
    eprintln!(
        "listening on {}; on the other host: uccl bench --connect <this host>",
        listener.local_addr()?
    );
    loop {
        let (stream, from) = listener.accept()?;
        match serve_one(stream, psk.as_deref()) {
            Ok(host) => eprintln!("{from} ({host}): done"),
            Err(error) => eprintln!("{from}: {error:#}"),
        }
        if once {
            return Ok(());
        }
    }
}

fn serve_one(stream: TcpStream, psk: Option<&[u8]>) -> Result<String> {
    let ip = stream.peer_addr()?.ip();
    let mut channel = Channel::over(stream)?;
    let host = greet(&mut channel, Role::Serve, psk)?;
    eprintln!("{ip} ({host}): begins");
    Server::new(channel, Some(ip)).serve()?;
    Ok(host)
}

/// The state of the serving side between requests. Memory of a point goes before its endpoint does.
struct Server {
    memory: Option<PointMemory>,
    side: Option<Side>,
    channel: Channel,
    /// The leading side's address; none if it is this process's parent.
    lead: Option<IpAddr>,
}

impl Server {
    fn new(channel: Channel, lead: Option<IpAddr>) -> Self {
        Self { memory: None, side: None, channel, lead }
    }

    /// Answers until the leading side hangs up.
    fn serve(mut self) -> Result<()> {
        while let Some(request) = self.channel.next()? {
            let reply = self.answer(request).unwrap_or_else(|error| {
                let error = format!("{error:#}");
                Reply::Failed { error }
            });
            self.channel.send(&reply)?;
        }
        Ok(())
    }

    fn answer(&mut self, request: Request) -> Result<Reply> {
        match request {
            Request::Check { seed } => {
                let memory = self.memory.as_ref().context(NOT_PREPARED)?;
                Ok(Reply::Checked { wrong: memory.check(seed)? })
            }
            Request::Close => {
                self.memory = None;
                self.side = None;
                Ok(Reply::Done)
            }
            Request::Fill { seed } => {
                self.memory.as_mut().context(NOT_PREPARED)?.fill(seed)?;
                Ok(Reply::Done)
            }
            Request::Go(phase) => self.run_phase(&phase),
            Request::Limit(limit) => limits::serve(&limit, &mut self.channel, self.lead),
            Request::Open(open) => {
                let listening = ListeningEndpoint::start(&open)?;
                let gpu = open.gpu.map(place::name).transpose()?;
                self.channel.send(&Reply::Opened { port: listening.port(), gpu })?;
                self.side = Some(listening.accept(&mut self.channel.watch_words()?)?);
                Ok(Reply::Accepted)
            }
            Request::Prepare { point, adverts } => self.prepare(point, adverts),
            Request::Release => {
                self.memory = None;
                Ok(Reply::Done)
            }
        }
    }

    fn prepare(&mut self, point: Point, adverts: Vec<WireAdvert>) -> Result<Reply> {
        self.memory = None;
        let side = self.side.as_ref().context("memory was asked for before a connection")?;
        let mut memory = PointMemory::new(side, point, Role::Serve)?;
        memory.meet(adverts)?;
        let adverts = memory.adverts()?;
        self.memory = Some(memory);
        Ok(Reply::Prepared { adverts })
    }

    fn run_phase(&mut self, phase: &Phase) -> Result<Reply> {
        let side = self.side.as_ref().context(NOT_PREPARED)?;
        let memory = self.memory.as_mut().context(NOT_PREPARED)?;
        self.channel.send(&Reply::Ready)?;
        let took = memory.run_phase(side, phase, &self.channel)?;
        Ok(Reply::Finished { elapsed_ns: took.elapsed.as_nanos() as u64 })
    }
}

const NOT_PREPARED: &str = "something was asked for before the memory for it";
