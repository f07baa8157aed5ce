//! The conformance tests of links, over real devices.

use std::sync::Arc;

use uccl_conformance::over_rails;
use uccl_verbs::VerbsSettings;

use crate::support::{Cable, Rails, all_kinds_of_channels};

#[test]
fn every_kind_of_channel() {
    for (kind, settings) in all_kinds_of_channels() {
        if Rails::open(Cable::Shared, &settings).is_none() {
            return;
        }
        uccl_conformance::run(kind, || joined(&settings));
    }
}

fn joined(settings: &VerbsSettings) -> [uccl_conformance::End; 2] {
    let Rails { a, b } = Rails::open(Cable::Shared, settings).expect("it was there");
    over_rails([vec![Arc::new(a)], vec![Arc::new(b)]])
}
