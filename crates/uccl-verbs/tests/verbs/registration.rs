//! Memory that a device takes, and memory that it does not.

use uccl_device::MemoryKind;
use uccl_fabric::{
    mem::Span,
    rail::{Rail, RailError},
    region::Rights,
};

use crate::support::{Rails, span_of};

fn refusal(rails: &Rails, span: Span) -> String {
    match rails.a.register(span, MemoryKind::Host, Rights::ALL) {
        Ok(_) => panic!("{span:?} was taken"),
        Err(error @ RailError::Provider { .. }) => error.to_string(),
        Err(error) => panic!("{error:?}"),
    }
}

#[test]
fn memory_that_is_not_there_is_refused() {
    let Some(rails) = Rails::shared() else { return };
    let said = refusal(&rails, Span { addr: 0x1000, len: 4096 });
    assert!(said.contains("4096 bytes at 0x1000") && said.contains("ibv_reg_mr"), "{said}");
    refusal(&rails, Span { addr: usize::MAX - 4096, len: 8192 });
}

#[test]
fn regions_may_overlap_and_have_no_bytes() {
    let Some(rails) = Rails::shared() else { return };
    let bytes = vec![0u8; 10_000];
    let whole = span_of(&bytes);
    let part = Span { addr: whole.addr + 1000, len: 77 };
    let register =
        |span| rails.a.register(span, MemoryKind::Host, Rights::ALL).expect("registered");
    let regions = [register(whole), register(part), register(part)];
    let keys: Vec<_> = regions.iter().map(|region| region.remote_key()).collect();
    assert_eq!(keys[1].base, part.addr as u64);
    assert!(keys[0].key != keys[1].key && keys[1].key != keys[2].key);
    let none = register(Span { addr: whole.addr, len: 0 });
    assert_eq!(none.remote_key().key.len(), 4);
}
