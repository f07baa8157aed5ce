//! Times of short messages between two processes of this host, beside raw system calls: medians of
//! some rounds, in microseconds.
//!
//! `cargo run --release -p uccl-p2p --example short_messages [ROUNDS [CONNECTIONS]]`

use std::{
    env,
    error::Error,
    io::{self, BufRead, BufReader, ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    time::Instant,
};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use uccl_p2p::{
    Config, ConnId, Endpoint, Iov, MrId, NoInterrupt, Op, Request, Transport, wire::advert::Advert,
};

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

const SHORT: usize = 64;
const LONG: usize = 1 << 20;

fn main() -> Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    // A connection over TCP takes a descriptor.
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
    match words[..] {
        ["raw"] => echo_raw(),
        ["serve", transport, kind, connections] => {
            serve(transport, kind == "echo", connections.parse()?)
        }
        _ => {
            let number = |at: usize, or| words.get(at).map_or(Ok(or), |word| word.parse());
            lead(number(0, 7)?, number(1, 1000)?)
        }
    }
}

fn lead(rounds: usize, connections: usize) -> Result<()> {
    let tcp = Side::start("tcp", "idle", connections)?;
    let local = Side::start("local", "idle", 1)?;
    let heard = Side::start("local", "echo", 1)?;
    let mut all: Vec<(String, Vec<f64>)> = Vec::new();
    let mut note = |what: &str, us: f64| match all.iter_mut().find(|(known, _)| known == what) {
        Some((_, values)) => values.push(us),
        None => all.push((what.to_owned(), vec![us])),
    };
    // The first round warms up.
    for round in 0..=rounds {
        let mut measured = Vec::new();
        // It takes a processor as long as it is there.
        let mut raw = RawPeer::start()?;
        measured.push(("tcp, 64 B there and back, raw".to_owned(), timed(3000, |_| raw.ping())?));
        raw.end()?;
        measured.push(("tcp, write of 64 B".to_owned(), timed(3000, |_| tcp.write(0, SHORT))?));
        for count in [10, 100, connections] {
            let writes = timed(3000.max(2 * count), |at| tcp.write(at % count, SHORT))?;
            measured.push((format!("tcp, write of 64 B over {count} connections in turn"), writes));
        }
        measured.push(("tcp, write of 1 MiB".to_owned(), timed(300, |_| tcp.write(0, LONG))?));
        measured
            .push(("host, write of 64 B".to_owned(), timed(20_000, |_| local.write(0, SHORT))?));
        measured.push((
            "host, write of 64 B into mapped memory".to_owned(),
            timed(20_000, |_| local.write_mapped())?,
        ));
        let back = timed(20_000, |_| heard.ping())?;
        measured.push(("host, message of 64 B, half of there and back".to_owned(), back / 2.0));
        if round > 0 {
            measured.iter().for_each(|(what, us)| note(what, *us));
        }
    }
    for (what, values) in &mut all {
        println!("{:>9.3} us  {what}", median(values));
    }
    [tcp, local, heard].into_iter().try_for_each(Side::end)
}

/// The median of the times of these calls.
fn timed(calls: usize, mut call: impl FnMut(usize) -> Result<()>) -> Result<f64> {
    let mut times = Vec::with_capacity(calls);
    for at in 0..calls {
        let started = Instant::now();
        call(at)?;
        times.push(started.elapsed().as_secs_f64() * 1e6);
    }
    Ok(median(&mut times))
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn endpoint(transport: &str) -> Result<Endpoint> {
    let transport: Transport = transport.parse()?;
    let bind = Some([127, 0, 0, 1].into());
    Ok(Endpoint::new(Config { transport, bind, port: Some(0), ..Config::from_env()? })?)
}

/// An endpoint, its connections, and the peer's memory.
struct Side {
    peer: Child,
    endpoint: Endpoint,
    conns: Vec<ConnId>,
    memory: Vec<u8>,
    mr: MrId,
    adverts: [Advert; 2],
}

impl Side {
    fn start(transport: &str, kind: &str, connections: usize) -> Result<Self> {
        let (peer, line) = spawn(&["serve", transport, kind, &connections.to_string()])?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let [port, plain, mapped] = words[..] else { return Err(line.into()) };
        let endpoint = endpoint(transport)?;
        let address = ([127, 0, 0, 1], port.parse()?).into();
        let connect = |_| endpoint.connect(address, None, &mut NoInterrupt);
        let conns = (0..connections).map(connect).collect::<Result<_, _>>()?;
        let memory = vec![7; LONG];
        // SAFETY: the engine only reads it, and it is deregistered before it goes.
        let mr = unsafe { endpoint.register(memory.as_ptr() as usize, LONG) }?;
        let adverts = [advert_of(plain)?, advert_of(mapped)?];
        Ok(Self { peer, endpoint, conns, memory, mr, adverts })
    }

    fn write(&self, conn: usize, len: usize) -> Result<()> {
        self.write_to(self.conns[conn], len, &self.adverts[0])
    }

    fn write_mapped(&self) -> Result<()> {
        self.write_to(self.conns[0], SHORT, &self.adverts[1])
    }

    fn write_to(&self, conn: ConnId, len: usize, advert: &Advert) -> Result<()> {
        let iovs = [Iov { mr: self.mr, ptr: self.memory.as_ptr() as usize, len }];
        let adverts = [*advert];
        let request = Request::new(conn, Op::Write, &iovs, &adverts);
        self.endpoint.run(&request, &mut NoInterrupt)?;
        Ok(())
    }

    /// Sends a message, and waits for the one that comes back.
    fn ping(&self) -> Result<()> {
        let sent = self.endpoint.send_notif(self.conns[0], &self.memory[..SHORT], None)?;
        while self.endpoint.wait_notifs(None, &mut NoInterrupt)?.is_empty() {}
        self.endpoint.wait(sent, None, &mut NoInterrupt)?;
        Ok(())
    }

    fn end(mut self) -> Result<()> {
        self.endpoint.deregister(self.mr)?;
        self.endpoint.close()?;
        drop(self.peer.stdin.take());
        self.peer.wait()?;
        Ok(())
    }
}

fn advert_of(hex: &str) -> Result<Advert> {
    let byte = |at| u8::from_str_radix(hex.get(at..at + 2).unwrap_or_default(), 16);
    let bytes = (0..hex.len()).step_by(2).map(byte).collect::<Result<Vec<_>, _>>()?;
    Ok(Advert::decode(&bytes)?)
}

/// The peer: tells its port and its memory, and lives until its input or its connection ends.
fn serve(transport: &str, echoes: bool, connections: usize) -> Result<()> {
    let endpoint = endpoint(transport)?;
    let (plain, mapped) = (vec![0_u8; LONG], endpoint.alloc(LONG)?);
    let mut line = endpoint.addr().port().to_string();
    for address in [plain.as_ptr() as usize, mapped.as_ptr() as usize] {
        // SAFETY: nobody else uses it, and it is kept for longer than the endpoint is open.
        let mr = unsafe { endpoint.register(address, LONG) }?;
        let advert = endpoint.advertise(mr, address, LONG)?.encode();
        line.push(' ');
        line.extend(advert.iter().map(|byte| format!("{byte:02x}")));
    }
    println!("{line}");
    let mut conn = None;
    for _ in 0..connections {
        conn = Some(endpoint.accept(None, &mut NoInterrupt)?.conn);
    }
    while let (true, Some(conn)) = (echoes, conn) {
        let Ok(notifs) = endpoint.wait_notifs_from(conn, None, &mut NoInterrupt) else { break };
        for notif in notifs {
            let sent = endpoint.send_notif(conn, &notif.payload, None)?;
            endpoint.wait(sent, None, &mut NoInterrupt)?;
        }
    }
    io::stdin().read_to_end(&mut Vec::new())?;
    endpoint.close()?;
    drop((plain, mapped));
    Ok(())
}

fn spawn(words: &[&str]) -> Result<(Child, String)> {
    let mut peer = Command::new(env::current_exe()?)
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(peer.stdout.take().ok_or("no output")?).read_line(&mut line)?;
    Ok((peer, line))
}

/// A process that sends back all that it gets, by plain system calls.
struct RawPeer {
    peer: Child,
    stream: TcpStream,
}

impl RawPeer {
    fn start() -> Result<Self> {
        let (peer, line) = spawn(&["raw"])?;
        let stream = TcpStream::connect(("127.0.0.1", line.trim().parse()?))?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self { peer, stream })
    }

    fn ping(&mut self) -> Result<()> {
        self.stream.write_all(&[7; SHORT])?;
        receive(&mut self.stream)?;
        Ok(())
    }

    fn end(mut self) -> Result<()> {
        drop(self.stream);
        self.peer.wait()?;
        Ok(())
    }
}

/// Looks at a stream until a short message has come. False: it has ended.
fn receive(stream: &mut TcpStream) -> Result<bool> {
    let (mut bytes, mut got) = ([0; SHORT], 0);
    while got < SHORT {
        match stream.read(&mut bytes[got..]) {
            Ok(0) => return Ok(false),
            Ok(more) => got += more,
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(true)
}

fn echo_raw() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("{}", listener.local_addr()?.port());
    let mut stream = listener.accept()?.0;
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    while receive(&mut stream)? {
        stream.write_all(&[7; SHORT])?;
    }
    Ok(())
}
