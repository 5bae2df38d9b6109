//! The reporting-queue core on real memory, against hostile guests.
//!
//! `hostile` names what a guest can do wrong, one test each. `scenario` and `model` belong to the fuzz target of the same
//! name; here they replay its committed corpus and random bytes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::cast_possible_truncation, missing_docs)]

mod hostile;
#[path = "../../../fuzz/src/model.rs"]
mod model;
#[path = "../../../fuzz/src/scenario.rs"]
mod scenario;

use proptest::prelude::*;
use std::fs;
use std::path::Path;

#[test]
fn the_fuzzers_corpus_holds() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/reporting_queue");
    let mut inputs: Vec<_> = fs::read_dir(corpus).unwrap().map(|entry| entry.unwrap().path()).collect();
    inputs.sort();
    assert!(inputs.len() > 10, "the corpus is gone");
    for input in inputs {
        println!("{}", input.display());
        scenario::play(&fs::read(&input).unwrap());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]
    #[test]
    fn agrees_with_the_naive_model(input in prop::collection::vec(any::<u8>(), 0..400)) {
        scenario::play(&input);
    }
}
