//! The published table under every interleaving: `cargo xtask loom`.

use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;

use super::memo::Memo;
use super::published::{publish, read, retire};
use super::sync::explore;

/// An entry is read whole or not at all.
#[test]
fn loom_entry_is_whole() {
    explore(|| {
        let entry: Arc<[AtomicU64; 8]> = Arc::new(std::array::from_fn(|_| AtomicU64::new(0)));
        publish(&entry, &[1; 7]);
        // The owner is the thread that runs first: of the accesses before a store loom reorders the
        // last alone, which is the owner's own load, so that a reader that came before it would not
        // be tried after it.
        let reader = {
            let entry = entry.clone();
            thread::spawn(move || {
                if let Some((version, fields)) = read(&entry) {
                    let expected = if version == 1 { 1 } else { 2 };
                    assert_eq!(fields, [expected; 7], "version {version}");
                }
            })
        };
        retire(&entry);
        publish(&entry, &[2; 7]);
        reader.join().unwrap();
    });
}

/// A memo returns one value that was put, whole.
#[test]
fn loom_memo_is_whole() {
    explore(|| {
        let memo = Arc::new(Memo::<2, AtomicU64>::with_lines(1));
        let writers: Vec<_> = [1, 2]
            .map(|value| {
                let memo = memo.clone();
                thread::spawn(move || memo.put(0, &[value; 2]))
            })
            .into();
        if let Some([a, b]) = memo.get(0) {
            assert_eq!(a, b);
        }
        for writer in writers {
            writer.join().unwrap();
        }
    });
}
