//! Tests of lost ranks and of faults, which must hold on a real GPU as on an emulated one.

use std::time::Duration;

use uccl_ep::combine::Order;

use super::{
    super::{Lost, case::assert_second_is_late},
    Normal, Wrong,
};

/// Longer than it takes to report any fault.
const LIMIT: Duration = Duration::from_secs(20);

impl Normal {
    /// A rank that does not come is named, whether or not the host asks how much arrives.
    pub(crate) fn names_who_does_not_come(self) {
        for (is_worst, guess) in [(false, None), (true, None), (false, Some(4))] {
            let case = Self { is_worst, guess, ..self };
            let told = case.fails(Duration::from_millis(500), |me| (me == 0).then_some(case));
            assert_second_is_late(&told);
            assert!(told[1].is_empty(), "{told:?}");
        }
    }

    /// Calls go on without a rank that is late or masked.
    pub(crate) fn goes_on_without_the_lost(self) {
        let few = Self { rounds: 4, slots: 20, is_again: true, ..self };
        Self { lost: Some((0, Lost::Late)), ranks: 3, ..few }.run();
        Self { lost: Some((1, Lost::Masked)), is_worst: true, ..few }.run();
        let by_choice = Self { ranks: 3, order: Order::ByChoice, ..few };
        Self { lost: Some((1, Lost::Masked)), by_expert: Some(4), ..by_choice }.run();
    }

    /// A rank's fault is named. `second` is the error of two choices of a token, the second of
    /// which is no expert.
    pub(crate) fn names_what_is_wrong(self, second: &str) {
        let few = Self { slots: 20, ..self };
        let experts = (few.ranks * few.local_experts) as i32;
        for (wrong, said) in [
            (Wrong::FewRows(1), "rows arrive, and there is room for 1"),
            (Wrong::FewResults(1), "1 rows are given, and the handle tells of"),
            (Wrong::Choice(experts), "choice 0 of token 0 is no expert"),
            (Wrong::Choice(experts - 1), second),
        ] {
            let case = Self { wrong: Some(wrong), ..few };
            let told = case.fails(LIMIT, |_| Some(case));
            assert!(told[1].contains(said), "{wrong:?}: {told:?}");
        }
        // The host refuses these, and the other rank waits in vain.
        for wrong in [Wrong::TokensInBuffer, Wrong::ResultsInBuffer] {
            let case = Self { wrong: Some(wrong), is_worst: true, ..few };
            let told = case.fails(Duration::from_millis(500), |_| Some(case));
            assert!(told[1].contains("copy them first"), "{wrong:?}: {told:?}");
        }
        let by_expert = Self { by_expert: Some(4), ..few };
        for (wrong, said) in [
            (Wrong::FewRows(1), "rows arrive, and there is room for 1"),
            (Wrong::FewTokens(1), "rows arrive, and there is room for 1"),
            (Wrong::FewResults(1), "1 rows are given, and the handle tells of"),
        ] {
            let case = Self { wrong: Some(wrong), ..by_expert };
            let told = case.fails(LIMIT, |_| Some(case));
            assert!(told[1].contains(said), "{wrong:?} by expert: {told:?}");
        }
    }

    /// Tables that the caller has spoilt lead to no memory but its own.
    pub(crate) fn reaches_no_more_when_spoilt(self) {
        for by_expert in [None, Some(4)] {
            let case = Self { wrong: Some(Wrong::Spoilt), by_expert, slots: 20, ..self };
            let told = case.fails(LIMIT, |_| Some(case));
            assert!(told.iter().all(String::is_empty), "{told:?}");
        }
        // The only rank's rows stay where they are, so no rank waits for others.
        let case = Self { wrong: Some(Wrong::SpoiltStarts), ranks: 1, is_full: true, ..self };
        assert_eq!(case.fails(LIMIT, |_| Some(case)), [""]);
    }

    /// A host that is interrupted while it waits for a rank that does not come gives up, and so does its GPU.
    pub(crate) fn gives_up_when_interrupted(self) {
        for guess in [None, Some(4)] {
            let case = Self { wrong: Some(Wrong::Interrupted), guess, slots: 20, ..self };
            let told = case.fails(LIMIT, |me| (me == 1).then_some(case));
            assert!(
                told[1].contains("interrupted") && !told[1].contains("is not over"),
                "{told:?}"
            );
        }
    }

    /// Ranks with different calls get an error that names the difference.
    pub(crate) fn tells_in_what_ranks_differ(self) {
        let few = Self { slots: 20, ..self };
        let told = few.fails(LIMIT, |me| Some(Self { scales: 1 + me, ..few }));
        let told = told.join(" / ");
        let is_named = [
            "rank 1 has words of scales 2, this rank 1",
            "rank 0 has words of scales 1, this rank 2",
        ];
        assert!(is_named.iter().any(|said| told.contains(said)), "{told}");
        let told = few.fails(LIMIT, |me| Some(Self { stays: me == 1, is_worst: true, ..few }));
        let told = told.join(" / ");
        let is_named = ["4 barrier) 3, this rank 1", "4 barrier) 1, this rank 3"];
        assert!(is_named.iter().any(|said| told.contains(said)), "{told}");
    }
}
