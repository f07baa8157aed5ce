//! Bandwidth of large messages by streams and threads, and latency of small ones, over loopback.
//!
//! `cargo run --release -p uccl-flow --example loopback [STREAMS,... [THREADS,...]]`. Both ends run
//! in this process, each with a thread that posts and tests, as NCCL's proxy does.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use uccl_flow::{Buffer, Connect, FlowError, Flows, Listener, RecvFlow, SendFlow, Settings};

const OUTSTANDING: usize = 8;
const LATENCY_ROUNDS: u32 = 20_000;
const TIME: Duration = Duration::from_secs(1);

fn main() -> Result<(), FlowError> {
    let mut lists = std::env::args().skip(1).map(|list| {
        list.split(',').filter_map(|number| number.parse().ok()).collect::<Vec<usize>>()
    });
    let streams = lists.next().unwrap_or_else(|| vec![1, 2, 4, 8]);
    let threads = lists.next().unwrap_or_else(|| vec![1, 2, 4, 8]);
    println!("streams threads flows  message      GB/s  repeated chunks");
    for &streams in &streams {
        for &threads in &threads {
            for (flows, len) in [(1, 128 << 10), (2, 512 << 10), (4, 1 << 20)] {
                let settings = Settings { streams, threads, ..Settings::default() };
                let (rate, repeated) = bandwidth(settings, flows, len)?;
                println!("{streams:7} {threads:7} {flows:5} {len:8} {rate:9.2}  {repeated}");
            }
        }
    }
    println!("   bytes  round trip, us");
    for len in [0, 8, 1 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10] {
        let small_max = if len <= 64 << 10 { 64 << 10 } else { 32 << 10 };
        let time = latency(Settings { small_max, ..Settings::default() }, len)?;
        println!("{len:8} {time:8.2}");
    }
    Ok(())
}

/// GB/s of some flows at once, and the chunks that were sent more than once.
fn bandwidth(settings: Settings, flows: usize, len: usize) -> Result<(f64, u64), FlowError> {
    let (one, two) = (Flows::new(settings.clone())?, Flows::new(settings)?);
    let pairs = (0..flows).map(|_| pair(&one, &two)).collect::<Result<Vec<_>, _>>()?;
    let repeated = AtomicU64::new(0);
    let begun = Instant::now();
    let counts: Vec<_> = std::thread::scope(|scope| {
        let all = pairs.iter().map(|(send, recv)| {
            let (one, repeated) = (&one, &repeated);
            scope.spawn(move || {
                push(send, len, begun);
                let chunks = one.counters().iter().map(|peer| peer.repeated_chunks).sum();
                repeated.fetch_max(chunks, Ordering::Relaxed);
                send.close();
            });
            scope.spawn(move || pull(recv, len, begun))
        });
        let all: Vec<_> = all.collect();
        all.into_iter().map(|thread| thread.join().unwrap_or(Ok(0))).collect()
    });
    let bytes = counts.into_iter().sum::<Result<usize, _>>()? * len;
    Ok((bytes as f64 / TIME.as_secs_f64() / 1e9, repeated.load(Ordering::Relaxed)))
}

/// Sends until the time is over.
fn push(flow: &SendFlow, len: usize, begun: Instant) {
    let data: &'static [u8] = vec![1u8; len].leak();
    let mut slots = std::collections::VecDeque::new();
    while begun.elapsed() < TIME {
        while slots.len() < OUTSTANDING {
            // SAFETY: the data lives for ever.
            let Ok(Some(slot)) = (unsafe { flow.post(data.as_ptr(), len, 0) }) else { break };
            slots.push_back(slot);
        }
        if let Some(slot) = slots.front()
            && !matches!(flow.test(*slot), Ok(None))
        {
            slots.pop_front();
        } else {
            std::thread::yield_now();
        }
    }
}

fn pull(flow: &RecvFlow, len: usize, begun: Instant) -> Result<usize, FlowError> {
    let mut rooms = vec![vec![0u8; len]; OUTSTANDING];
    let mut slots = std::collections::VecDeque::new();
    let (mut posted, mut count) = (0, 0);
    while begun.elapsed() < TIME {
        while slots.len() < OUTSTANDING {
            let room = &mut rooms[posted % OUTSTANDING];
            let buffer = Buffer { ptr: room.as_mut_ptr(), len, tag: 0 };
            // SAFETY: the rooms live until the flow is closed, below, and are used in turn.
            let Ok(Some(slot)) = (unsafe { flow.post(&[buffer]) }) else { break };
            slots.push_back(slot);
            posted += 1;
        }
        if let Some(slot) = slots.front() {
            match flow.test(*slot) {
                Ok(None) => std::thread::yield_now(),
                Ok(Some(_)) => {
                    count += 1;
                    slots.pop_front();
                }
                // The other end's time is over.
                Err(_) => break,
            }
        }
    }
    flow.close();
    Ok(count)
}

/// Microseconds of a message there and one back.
fn latency(settings: Settings, len: usize) -> Result<f64, FlowError> {
    let (one, two) = (Flows::new(settings.clone())?, Flows::new(settings)?);
    let ((there, far), (back, near)) = (pair(&one, &two)?, pair(&two, &one)?);
    std::thread::scope(|scope| {
        let echo = scope.spawn(move || -> Result<(), FlowError> {
            let mut room = vec![0u8; len];
            for _ in 0..LATENCY_ROUNDS {
                receive(&far, &mut room)?;
                send(&back, &room)?;
            }
            Ok(())
        });
        let mut room = vec![0u8; len];
        let begun = Instant::now();
        for _ in 0..LATENCY_ROUNDS {
            send(&there, &room)?;
            receive(&near, &mut room)?;
        }
        let time = begun.elapsed();
        echo.join().unwrap_or(Ok(()))?;
        Ok(time.as_secs_f64() * 1e6 / f64::from(LATENCY_ROUNDS))
    })
}

fn send(flow: &SendFlow, data: &[u8]) -> Result<(), FlowError> {
    // SAFETY: the data lives until the message has ended, or its caller closes the flow.
    if let Some(slot) = unsafe { flow.post(data.as_ptr(), data.len(), 0) }? {
        while flow.test(slot)?.is_none() {
            std::thread::yield_now();
        }
    }
    Ok(())
}

fn receive(flow: &RecvFlow, room: &mut [u8]) -> Result<(), FlowError> {
    let buffer = Buffer { ptr: room.as_mut_ptr(), len: room.len(), tag: 0 };
    // SAFETY: the room lives until the receive has ended, or its caller closes the flow.
    if let Some(slot) = unsafe { flow.post(&[buffer]) }? {
        while flow.test(slot)?.is_none() {
            std::thread::yield_now();
        }
    }
    Ok(())
}

fn pair(sender: &Flows, receiver: &Flows) -> Result<(SendFlow, RecvFlow), FlowError> {
    let listener = Listener::listen(receiver, 0)?;
    let mut connecting = Connect::begin(sender, listener.handle(), 0)?;
    let send = loop {
        if let Some(flow) = connecting.poll()? {
            break flow;
        }
    };
    loop {
        if let Some(recv) = listener.try_accept()? {
            return Ok((send, recv));
        }
    }
}
