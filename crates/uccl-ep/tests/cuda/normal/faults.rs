//! Tests of lost ranks and of faults, which must hold on a real GPU as on an emulated one.

use std::time::Duration;

use uccl_ep::combine::Order;

use super::{
    super::{
        Loss,
        case::{REST, assert_second_is_late},
    },
    Fault, Normal,
};

/// Longer than it takes to report any fault.
const LIMIT: Duration = Duration::from_secs(20);

impl Normal {
    /// A rank that does not come is named, whether or not the host asks how much arrives.
    pub(crate) fn names_the_rank_that_does_not_come(self) {
        for (is_worst, guess) in [(false, None), (true, None), (false, Some(4))] {
            let case = Self { is_worst, guess, ..self };
            let errors = case.fails(Duration::from_millis(500), |me| (me == 0).then_some(case));
            assert_second_is_late(&errors);
            assert!(errors[1].is_empty(), "{errors:?}");
        }
    }

    /// Calls go on without a rank that is late or masked.
    pub(crate) fn goes_on_without_the_lost(self) {
        let few = Self { rounds: 4, slots: 20, is_cached: true, ..self };
        Self { lost: Some((0, Loss::Late)), ranks: 3, ..few }.run();
        Self { lost: Some((1, Loss::Masked)), is_worst: true, ..few }.run();
        let by_choice = Self { ranks: 3, order: Order::ByChoice, ..few };
        Self { lost: Some((1, Loss::Masked)), by_expert: Some(4), ..by_choice }.run();
    }

    /// A rank's fault is named. `second` is the error of two choices of a token, the second of
    /// which is no expert.
    pub(crate) fn names_the_fault_of_a_rank(self, second: &str) {
        let few = Self { slots: 20, ..self };
        let experts = (few.ranks * few.local_experts) as i32;
        for (wrong, said) in [
            (Fault::FewRows(1), "rows arrive, and there is room for 1"),
            (Fault::FewResults(1), "1 rows are given, and the handle tells of"),
            (Fault::Choice(experts), "choice 0 of token 0 is no expert"),
            (Fault::Choice(experts - 1), second),
        ] {
            let case = Self { fault: Some(wrong), ..few };
            let errors = case.fails(LIMIT, |_| Some(case));
            assert!(errors[1].contains(said), "{wrong:?}: {errors:?}");
        }
        // The host refuses these, and the other rank waits in vain.
        for wrong in [Fault::TokensInBuffer, Fault::ResultsInBuffer] {
            let case = Self { fault: Some(wrong), is_worst: true, ..few };
            let errors = case.fails(REST, |_| Some(case));
            assert!(errors[1].contains("copy them first"), "{wrong:?}: {errors:?}");
        }
        let by_expert = Self { by_expert: Some(4), ..few };
        for (wrong, said) in [
            (Fault::FewRows(1), "rows arrive, and there is room for 1"),
            (Fault::FewTokens(1), "rows arrive, and there is room for 1"),
            (Fault::FewResults(1), "1 rows are given, and the handle tells of"),
        ] {
            let case = Self { fault: Some(wrong), ..by_expert };
            let errors = case.fails(LIMIT, |_| Some(case));
            assert!(errors[1].contains(said), "{wrong:?} by expert: {errors:?}");
        }
    }

    /// Tables that the caller has spoilt lead to no memory but its own.
    pub(crate) fn reaches_no_more_when_spoilt(self) {
        for by_expert in [None, Some(4)] {
            let case = Self { fault: Some(Fault::Spoilt), by_expert, slots: 20, ..self };
            let errors = case.fails(LIMIT, |_| Some(case));
            assert!(errors.iter().all(String::is_empty), "{errors:?}");
        }
        // The only rank's rows stay where they are, so no rank waits for others.
        let case = Self { fault: Some(Fault::SpoiltStarts), ranks: 1, is_full: true, ..self };
        assert_eq!(case.fails(LIMIT, |_| Some(case)), [""]);
    }

    /// A host that is interrupted while it waits for a rank that does not come gives up, and so
    /// does its GPU.
    pub(crate) fn gives_up_when_interrupted(self) {
        for guess in [None, Some(4)] {
            let case = Self { fault: Some(Fault::Interrupted), guess, slots: 20, ..self };
            let errors = case.fails(LIMIT, |me| (me == 1).then_some(case));
            assert!(
                errors[1].contains("interrupted") && !errors[1].contains("is not over"),
                "{errors:?}"
            );
        }
    }

    /// Ranks with different calls get an error that names the difference.
    pub(crate) fn names_the_difference_of_ranks(self) {
        let few = Self { slots: 20, ..self };
        let errors = few.fails(LIMIT, |me| Some(Self { scales: 1 + me, ..few }));
        let errors = errors.join(" / ");
        let is_named = [
            "rank 1 has words of scales 2, this rank 1",
            "rank 0 has words of scales 1, this rank 2",
        ];
        assert!(is_named.iter().any(|said| errors.contains(said)), "{errors}");
        let errors =
            few.fails(LIMIT, |me| Some(Self { zero_copy: me == 1, is_worst: true, ..few }));
        let errors = errors.join(" / ");
        let is_named = ["4 barrier) 3, this rank 1", "4 barrier) 1, this rank 3"];
        assert!(is_named.iter().any(|said| errors.contains(said)), "{errors}");
    }
}
