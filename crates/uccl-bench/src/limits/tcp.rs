//! Raw TCP between two processes: one stream's rate, and a round trip.

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use socket2::SockRef;

use super::{Channel, Latencies, LimitRequest, Reply, Row, Spin, latencies, rate};
use crate::control::{Request, unexpected};

/// Bytes of one blocking call.
const CALL: usize = 1 << 20;

/// Bytes of a ping.
const PING: usize = 64;

/// How long the other side is waited for.
const MEET: Duration = Duration::from_secs(10);

pub(super) fn serve_sink(channel: &mut Channel, lead: Option<IpAddr>) -> Result<Reply> {
    let mut stream = accept(channel, lead)?;
    let mut buffer = vec![0; CALL];
    while stream.read(&mut buffer)? > 0 {}
    Ok(Reply::Done)
}

pub(super) fn serve_echo(channel: &mut Channel, lead: Option<IpAddr>) -> Result<Reply> {
    let mut stream = accept(channel, lead)?;
    spinning(&stream)?;
    let mut ping = [0; PING];
    while receive(&mut stream, &mut ping)? {
        send(&mut stream, &ping)?;
    }
    Ok(Reply::Done)
}

/// Listens at any port, sends the port number, and takes the leading side's connection.
fn accept(channel: &mut Channel, lead: Option<IpAddr>) -> Result<TcpStream> {
    let any: IpAddr = match lead {
        None => Ipv4Addr::LOCALHOST.into(),
        Some(IpAddr::V4(_)) => Ipv4Addr::UNSPECIFIED.into(),
        Some(IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let listener = TcpListener::bind((any, 0))?;
    channel.send(&Reply::Listening { port: listener.local_addr()?.port() })?;
    listener.set_nonblocking(true)?;
    let deadline = Instant::now() + MEET;
    while Instant::now() < deadline {
        match listener.accept() {
            // Strangers may connect to an open port.
            Ok((_, from)) if lead.is_some_and(|lead| lead != from.ip()) => {}
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(error.into()),
        }
    }
    bail!("nobody connected within {MEET:?}")
}

fn connect(channel: &mut Channel, ip: IpAddr, request: LimitRequest) -> Result<TcpStream> {
    match channel.ask(&Request::Limit(request))? {
        Reply::Listening { port } => TcpStream::connect_timeout(&(ip, port).into(), MEET)
            .with_context(|| format!("cannot connect to {ip} port {port}")),
        other => Err(unexpected(&other)),
    }
}

/// Ends the connection, and the other side's part with it.
fn finish(channel: &mut Channel, stream: TcpStream) -> Result<()> {
    drop(stream);
    match channel.reply()? {
        Reply::Done => Ok(()),
        other => Err(unexpected(&other)),
    }
}

/// One congestion control's result.
struct Stream {
    gb_per_s: Option<f64>,
    count: u64,
    congestion: String,
}

pub(super) fn measure_stream(channel: &mut Channel, ip: IpAddr, time: Duration) -> Result<Row> {
    let mut best = stream(channel, ip, time, None)?;
    let mut note = format!("{}, the default", best.congestion);
    if best.congestion != "cubic" {
        match stream(channel, ip, time, Some("cubic")) {
            Ok(cubic) if cubic.gb_per_s > best.gb_per_s => {
                let slower = best.gb_per_s.unwrap_or_default();
                note = format!("cubic; with {note}: {slower:.2}");
                best = cubic;
            }
            Ok(cubic) => {
                note = format!("{note}; with cubic: {:.2}", cubic.gb_per_s.unwrap_or_default());
            }
            Err(error) => note = format!("{note}; no cubic: {error:#}"),
        }
    }
    let Stream { gb_per_s, count, .. } = best;
    Ok(Row { gb_per_s, count, note: Some(note), ..Row::limit("tcp-stream", CALL as u64) })
}

fn stream(
    channel: &mut Channel,
    ip: IpAddr,
    time: Duration,
    congestion: Option<&str>,
) -> Result<Stream> {
    let mut stream = connect(channel, ip, LimitRequest::TcpSink)?;
    let measured = send_all(&mut stream, time, congestion);
    finish(channel, stream)?;
    measured
}

fn send_all(stream: &mut TcpStream, time: Duration, congestion: Option<&str>) -> Result<Stream> {
    let socket = SockRef::from(&*stream);
    if let Some(name) = congestion {
        socket.set_tcp_congestion(name.as_bytes())?;
    }
    let name = socket.tcp_congestion().unwrap_or_default();
    let name = String::from_utf8_lossy(&name).trim_end_matches('\0').to_owned();
    let buffer = vec![0xa5; CALL];
    let (gb_per_s, count) = rate(CALL as u64, time, || Ok(stream.write_all(&buffer)?))?;
    Ok(Stream { gb_per_s, count, congestion: name })
}

pub(super) fn measure_round_trip(channel: &mut Channel, ip: IpAddr, time: Duration) -> Result<Row> {
    let mut stream = connect(channel, ip, LimitRequest::TcpEcho)?;
    let measured = ping(&mut stream, time);
    finish(channel, stream)?;
    let latencies = measured?;
    let latency_us = latencies.summary(1);
    Ok(Row { count: latencies.count(), latency_us, ..Row::limit("tcp-rtt", PING as u64) })
}

fn ping(stream: &mut TcpStream, time: Duration) -> Result<Latencies> {
    spinning(stream)?;
    let mut buffer = [0xa5; PING];
    latencies(time, || {
        send(stream, &buffer)?;
        match receive(stream, &mut buffer)? {
            true => Ok(()),
            false => bail!("the other side closed the connection"),
        }
    })
}

fn spinning(stream: &TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    Ok(stream.set_nonblocking(true)?)
}

fn send(stream: &mut TcpStream, buffer: &[u8]) -> Result<()> {
    let mut spin = Spin::new();
    let mut sent = 0;
    while sent < buffer.len() {
        match stream.write(&buffer[sent..]) {
            Ok(more) => sent += more,
            Err(error) if error.kind() == ErrorKind::WouldBlock => spin.turn()?,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Fills the buffer; false if the other side is done.
fn receive(stream: &mut TcpStream, buffer: &mut [u8]) -> Result<bool> {
    let mut spin = Spin::new();
    let mut got = 0;
    while got < buffer.len() {
        match stream.read(&mut buffer[got..]) {
            Ok(0) => return Ok(false),
            Ok(more) => got += more,
            Err(error) if error.kind() == ErrorKind::WouldBlock => spin.turn()?,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(true)
}
