//! A device that is removed in mid-transfer: its transfers move to another link, and nothing hangs.

use uccl_p2p::{Config, NoInterrupt};

use crate::{
    cables::Spare,
    ends::{EndMemory, Way, back, devices, joined_over, set, there, until},
    support::Pair,
};

const LEN: usize = 24 << 20;

/// Two endpoints over the spare cable and `others` cables of the guest.
fn joined(spare: &Spare, others: usize, change: impl Fn(&mut Config)) -> Pair {
    let end = |variable, end: usize| {
        let mut names = devices(variable, others);
        names.push(spare.devices[end].clone());
        names
    };
    joined_over([end("RDMA_VM_DEVS", 0), end("RDMA_VM_PEER_DEVS", 1)], change)
}

/// Removes a part of the spare cable while both ends write, and then ends everything.
fn without(others: usize, change: impl Fn(&mut Config), remove: impl Fn(&Spare)) {
    let Some(spare) = Spare::plug() else { return };
    let p = joined(&spare, others, change);
    let [one, other] = [there(&p), back(&p)];
    until("both rails", || one.rails() == others + 1 && other.rails() == others + 1);
    let [mut forth_memory, mut back_memory] = [LEN; 2].map(EndMemory::new);
    let before = spare.cable.bytes();
    let both = |_| {
        let middle = |id| {
            assert!(spare.cable.until_used(before, one, id), "it was too quick");
            remove(&spare);
        };
        forth_memory.write(one, middle).expect("it goes another way");
    };
    back_memory.write(other, both).expect("it goes another way");
    goes_on(&p, others);
    p.a.close().expect("closed");
    p.b.close().expect("closed");
}

/// Old and new connections work with the remaining rails.
fn goes_on(p: &Pair, rails: usize) {
    until("the loss of the rail", || there(p).rails() == rails && back(p).rails() == rails);
    let mut memory = EndMemory::new(1 << 20);
    memory.write(there(p), |_| {}).expect("what is left is used");
    memory.write(back(p), |_| {}).expect("what is left is used");
    let conn = p.a.connect(p.b.addr(), None, &mut NoInterrupt);
    if rails == 0 {
        let why = conn.expect_err("a link without rails was asked for").to_string();
        return assert!(why.contains("spare"), "{why}");
    }
    let conn = conn.expect("connected");
    p.b.accept(None, &mut NoInterrupt).expect("accepted");
    let anew = Way { from: &p.a, to: &p.b, conn };
    assert_eq!(anew.rails(), rails);
    memory.write(anew, |_| {}).expect("what is left is used");
}

fn rc(_: &mut Config) {}

fn uc(config: &mut Config) {
    set(config, "UCCL_RCMODE", "0");
}

#[test]
fn our_device() {
    without(1, rc, |spare| spare.remove_device(0));
}

#[test]
fn the_peers_device() {
    without(1, rc, |spare| spare.remove_device(1));
}

#[test]
fn the_cable_with_both_devices() {
    without(1, rc, Spare::remove);
    without(1, uc, Spare::remove);
}

#[test]
fn the_only_device() {
    without(0, rc, |spare| spare.remove_device(0));
    without(0, rc, |spare| spare.remove_device(1));
    without(0, uc, Spare::remove);
}
