//! Hosts with several links, which are cut, slow, or lead nowhere.

mod common;

use std::{
    net::IpAddr,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use common::{exchange, hosts::Hosts, until};
use uccl_flow::{Connect, Device, Flows, Handle, Listener, RecvFlow, SendFlow, Settings};

const LIMIT: Duration = Duration::from_secs(12);
const CUT: Duration = Duration::from_secs(3);

/// The flows of each host, with all addresses given, and a flow between them.
struct Pair {
    flow: (SendFlow, RecvFlow),
    sender: Flows,
    _receiver: Flows,
}

fn joined(hosts: &Hosts, addrs: [&[&str]; 2]) -> Pair {
    let [sender, receiver] = [0, 1].map(|host| {
        let parsed = addrs[host].iter().map(|addr| addr.parse::<IpAddr>().expect("an address"));
        let device = Device { name: "all".into(), addrs: parsed.collect() };
        let settings =
            Settings { devices: vec![device], threads: 2, limit: LIMIT, ..Settings::default() };
        hosts.on(host, || Flows::new(settings)).expect("flows")
    });
    let listener = Listener::listen(&receiver, 0).expect("a listener");
    // The process that plays both hosts has one namespace of its own.
    let handle = Handle { network: [1; 16], ..listener.handle().clone() };
    let mut connecting = Connect::begin(&sender, &handle, 0).expect("an attempt");
    let send = hosts.on(0, move || until(|| connecting.poll().expect("a connection")));
    let recv = until(|| listener.try_accept().expect("a flow"));
    Pair { flow: (send, recv), sender, _receiver: receiver }
}

impl Pair {
    fn wait_for_streams(&self) {
        until(|| {
            let counters = &self.sender.counters()[0];
            (counters.open_streams >= counters.streams).then_some(())
        });
    }
}

/// Links of two hosts, each a network of its own; the addresses of both.
fn links(hosts: &Hosts, count: usize) -> [Vec<String>; 2] {
    for link in 0..count {
        hosts.link(&format!("eth{link}"));
        for host in 0..2 {
            hosts.run(host, &format!("ip address add 10.9.{link}.{}/24 dev eth{link}", host + 1));
        }
    }
    [1, 2].map(|host| (0..count).map(|link| format!("10.9.{link}.{host}")).collect())
}

fn texts(addrs: &[Vec<String>; 2]) -> [Vec<&str>; 2] {
    [0, 1].map(|host| addrs[host].iter().map(String::as_str).collect())
}

fn on_links(hosts: &Hosts, count: usize) -> Pair {
    let addrs = links(hosts, count);
    let [first, second] = texts(&addrs);
    joined(hosts, [&first, &second])
}

/// Large and small messages go round while something happens to the links.
fn busy(joined: &Pair, event: impl FnOnce() + Send) {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let end = OnDrop(&is_over);
        scope.spawn(move || {
            let _end = end;
            event();
        });
        while !is_over.load(Ordering::Relaxed) {
            exchange(&joined.flow, (4, 1 << 20), |_| {});
            exchange(&joined.flow, (20, 1000), |_| {});
        }
    });
}

/// Says that something is over, also after a panic.
struct OnDrop<'a>(&'a AtomicBool);

impl Drop for OnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Waits until each of these links carries bytes of large messages again.
fn wait_for_bytes(hosts: &Hosts, links: &[&str]) {
    let since = Instant::now();
    for link in links {
        let before = hosts.sent(0, link);
        until(|| {
            std::thread::sleep(Duration::from_millis(5));
            (hosts.sent(0, link) > before + (2 << 20)).then_some(())
        });
    }
    println!("{links:?} carry bytes after {:?}", since.elapsed());
}

#[test]
fn links_that_are_cut_for_a_while_are_used_again() {
    let Some(hosts) = Hosts::new() else { return };
    let joined = on_links(&hosts, 2);
    joined.wait_for_streams();
    let cut = |links: &[&str]| {
        busy(&joined, || {
            links.iter().for_each(|link| hosts.run(1, &format!("ip link set {link} down")));
            std::thread::sleep(CUT);
            links.iter().for_each(|link| hosts.run(1, &format!("ip link set {link} up")));
            wait_for_bytes(&hosts, &["eth0", "eth1"]);
        });
        joined.wait_for_streams();
    };
    cut(&["eth1"]);
    cut(&["eth0"]);
    cut(&["eth0", "eth1"]);
}

#[test]
fn four_links_all_carry_bytes() {
    let Some(hosts) = Hosts::new() else { return };
    let joined = on_links(&hosts, 4);
    joined.wait_for_streams();
    busy(&joined, || wait_for_bytes(&hosts, &["eth0", "eth1", "eth2", "eth3"]));
}

/// Limits links. False, with the reason on stderr, where that cannot be.
fn shape(hosts: &Hosts, rates: &[(&str, &str)]) -> bool {
    let is_shaped = rates.iter().all(|(link, rate)| {
        let tbf = format!("tbf rate {rate} burst 64k latency 50ms");
        hosts.try_run(0, &format!("tc qdisc add dev {link} root {tbf}"))
    });
    if !is_shaped {
        eprintln!("skipped: lacks tc, or the kernel tbf: links of a given speed");
    }
    is_shaped
}

#[test]
fn more_streams_are_tried_on_a_link_that_is_full() {
    let Some(hosts) = Hosts::new() else { return };
    let joined = on_links(&hosts, 1);
    joined.wait_for_streams();
    let open = || joined.sender.counters()[0].open_streams;
    assert_eq!(open(), 4);
    if !shape(&hosts, &[("eth0", "200mbit")]) {
        return;
    }
    until(|| {
        exchange(&joined.flow, (30, 1 << 20), |_| {});
        (open() == joined.sender.settings().streams).then_some(())
    });
    exchange(&joined.flow, (20, 100), |_| {});
}

#[test]
fn a_slow_link_carries_its_share() {
    let Some(hosts) = Hosts::new() else { return };
    let addrs = links(&hosts, 2);
    // Slower than a busy machine: its processors do not bound the faster one.
    if !shape(&hosts, &[("eth0", "200mbit"), ("eth1", "20mbit")]) {
        return;
    }
    let [first, second] = texts(&addrs);
    let joined = joined(&hosts, [&first, &second]);
    joined.wait_for_streams();
    // The speeds become known.
    exchange(&joined.flow, (20, 1 << 20), |_| {});
    let before = ["eth0", "eth1"].map(|link| hosts.sent(0, link));
    exchange(&joined.flow, (60, 1 << 20), |_| {});
    let sent = [0, 1].map(|at| hosts.sent(0, ["eth0", "eth1"][at]) - before[at]);
    assert!(sent[1] * 4 < sent[0], "a tenth of the speed: {sent:?}");
}

#[test]
fn ipv6_alone_is_enough() {
    let Some(hosts) = Hosts::new() else { return };
    hosts.link("eth0");
    for host in 0..2 {
        if !hosts.try_run(host, &format!("ip address add fd09::{}/64 dev eth0 nodad", host + 1)) {
            eprintln!("skipped: lacks IPv6");
            return;
        }
    }
    let joined = joined(&hosts, [&["fd09::1"], &["fd09::2"]]);
    joined.wait_for_streams();
    exchange(&joined.flow, (20, 1 << 20), |_| {});
    exchange(&joined.flow, (20, 100), |_| {});
}

#[test]
fn addresses_that_lead_nowhere_are_passed_over() {
    let Some(hosts) = Hosts::new() else { return };
    links(&hosts, 1);
    for host in 0..2 {
        // Docker's bridge has the same address on every host, and this veth has no route.
        hosts.run(host, "ip link add docker0 type bridge");
        hosts.run(host, "ip address add 172.17.0.1/16 dev docker0");
        hosts.run(host, "ip link set docker0 up");
        hosts.run(host, "ip link add lone0 type veth peer name lone1");
        hosts.run(host, &format!("ip address add 192.0.2.{}/32 dev lone0", host + 1));
        hosts.run(host, "ip link set lone0 up");
    }
    let joined = joined(
        &hosts,
        [&["172.17.0.1", "192.0.2.1", "10.9.0.1"], &["172.17.0.1", "192.0.2.2", "10.9.0.2"]],
    );
    joined.wait_for_streams();
    exchange(&joined.flow, (20, 1 << 20), |_| {});
    exchange(&joined.flow, (20, 100), |_| {});
}

#[test]
fn two_links_of_one_network_are_enough() {
    let Some(hosts) = Hosts::new() else { return };
    let mut addrs = [Vec::new(), Vec::new()];
    for link in 0..2 {
        hosts.link(&format!("eth{link}"));
        for (host, addrs) in addrs.iter_mut().enumerate() {
            let addr = format!("10.9.0.{}", 2 * link + host + 1);
            hosts.run(host, &format!("ip address add {addr}/24 dev eth{link}"));
            addrs.push(addr);
        }
    }
    let [first, second] = texts(&addrs);
    let joined = joined(&hosts, [&first, &second]);
    joined.wait_for_streams();
    exchange(&joined.flow, (20, 1 << 20), |_| {});
    exchange(&joined.flow, (20, 100), |_| {});
}
