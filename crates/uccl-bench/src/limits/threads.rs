//! One hop between two threads of this process.

use std::{thread, time::Duration};

use anyhow::{Result, anyhow};
use rtrb::{Consumer, Producer, RingBuffer};

use super::{Latencies, Row, Spin, latencies};

const CAPACITY: usize = 64;
const OVER: u64 = u64::MAX;

pub(super) fn measure(time: Duration) -> Result<Row> {
    let (mut ping, mut pinged) = RingBuffer::new(CAPACITY);
    let (mut pong, mut ponged) = RingBuffer::new(CAPACITY);
    let latencies = thread::scope(|scope| -> Result<Latencies> {
        let echoing = scope.spawn(move || echo(&mut pinged, &mut pong));
        let mut number = 0;
        let measured = latencies(time, || {
            push(&mut ping, number)?;
            number = pop(&mut ponged)? + 1;
            Ok(())
        });
        push(&mut ping, OVER)?;
        echoing.join().map_err(|_| anyhow!("the other thread panicked"))??;
        measured
    })?;
    let latency_us = latencies.summary(2);
    Ok(Row { count: latencies.count(), latency_us, ..Row::limit("thread-hop", 8) })
}

fn echo(from: &mut Consumer<u64>, to: &mut Producer<u64>) -> Result<()> {
    loop {
        let number = pop(from)?;
        if number == OVER {
            return Ok(());
        }
        push(to, number)?;
    }
}

fn push(queue: &mut Producer<u64>, number: u64) -> Result<()> {
    queue.push(number).map_err(|_| anyhow!("the queue between the threads is full"))
}

fn pop(queue: &mut Consumer<u64>) -> Result<u64> {
    let mut spin = Spin::new();
    loop {
        if let Ok(number) = queue.pop() {
            return Ok(number);
        }
        spin.turn()?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_measures_and_ends() {
        let row = measure(Duration::from_millis(2)).expect("a row");
        assert!(row.count > 0 && row.latency_us.is_some() && row.gb_per_s.is_none());
    }
}
