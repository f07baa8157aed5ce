//! Plans of dispatches in normal mode: the memory that they ask for, and when the host waits.

use std::{num::NonZero, sync::Arc, time::Duration};

use uccl_ep::{
    Error,
    cuda::{self, normal},
};

use super::{Gpu, Ranks, world};

/// Far more than a call takes.
const LIMIT: Duration = Duration::from_secs(60);
const HIDDEN: usize = 64;
const TOKENS: usize = 5;

/// The layouts of a dispatch's two workspaces, and the numbers of rows that it asks for.
#[derive(Default)]
struct MemoryRequests {
    workspaces: Vec<normal::WorkspaceLayout>,
    rows: Vec<Option<usize>>,
    waits: bool,
}

/// One rank of a group.
struct Rank<'a> {
    group: Arc<cuda::Group>,
    gpu: &'a Gpu,
    ranks: usize,
    input: normal::DispatchInput,
    choices: cuda::Choices,
}

/// A dispatch's memory and result.
struct DispatchRun {
    result: normal::DispatchResult,
    asked: MemoryRequests,
    /// The first bytes of the received rows.
    marks: Vec<u8>,
}

impl<'a> Rank<'a> {
    /// Joins a group. Each token chooses an expert of each rank.
    fn join(ranks: &Ranks, me: usize, count: usize, gpu: &'a Gpu) -> Self {
        let config = cuda::Config {
            rank: me,
            ranks: count,
            pool: 1 << 20,
            timeout: LIMIT,
            masks_late: false,
            device: 0,
            blocks: 2,
            is_alone: count == 1,
            reach: cuda::Reach::Any,
            node: None,
            network: None,
        };
        let group = cuda::Group::join(config, &mut ranks.exchange(me)).expect("it joins");
        let mark = |token: usize| (me * 16 + token) as u8;
        let rows: Vec<u8> = (0..TOKENS).flat_map(|token| [mark(token); 2 * HIDDEN]).collect();
        let experts: Vec<i64> = (0..TOKENS).flat_map(|_| (0..count).map(|r| r as i64)).collect();
        let input = normal::DispatchInput {
            rows: gpu.upload(&rows),
            stride: 2 * HIDDEN,
            payload: 2 * HIDDEN,
            scales: None,
            weights: 0,
            max_blocks: NonZero::new(2),
        };
        let choices = cuda::Choices {
            experts: gpu.upload(&experts),
            is_64: true,
            tokens: TOKENS,
            top_k: count,
            num_experts: count,
        };
        Self { group, gpu, ranks: count, input, choices }
    }

    fn plan(&self, zero_copy: bool, fills_tables: bool) -> normal::Plan {
        normal::Plan::new(normal::PlanShape {
            ranks: self.ranks,
            hidden: HIDDEN,
            row_bytes: 2 * HIDDEN,
            scales: 0,
            top_k: self.ranks,
            num_experts: self.ranks,
            alignment: None,
            choice_words: 0,
            has_weights: false,
            zero_foreign_weights: false,
            zero_gaps: false,
            fills_tables,
            is_col_major: false,
            zero_copy,
            can_fuse: self.group.can_fuse(),
        })
    }

    fn request<'b>(&self, routing: normal::Routing<'b>) -> normal::DispatchRequest<'b> {
        normal::DispatchRequest {
            input: self.input,
            routing,
            row_layout: None,
            max_tokens: None,
            needs_counts: false,
        }
    }

    fn choosing(&self) -> normal::DispatchRequest<'static> {
        self.request(normal::Routing::Choices(self.choices))
    }

    fn memory(&self, layout: &normal::WorkspaceLayout, rows: Option<usize>) -> normal::RecvMemory {
        let workspace = self.gpu.upload(&vec![0xeeee_eeee_u32; layout.len]);
        let rows = rows.map_or(0, |rows| self.gpu.upload(&vec![0xee_u8; rows * 2 * HIDDEN]));
        normal::RecvMemory { workspace, rows, scales: None }
    }

    fn dispatch(&self, plan: &normal::Plan, request: normal::DispatchRequest<'_>) -> DispatchRun {
        let planned = plan.prepare(&self.group, request).expect("a dispatch");
        let mut asked = MemoryRequests { waits: planned.waits(), ..MemoryRequests::default() };
        asked.workspaces.push(*planned.workspace());
        asked.rows.push(planned.num_rows());
        let mut memory = self.memory(planned.workspace(), planned.num_rows());
        let stream = &self.gpu.stream;
        // SAFETY: the memory is as long as the dispatch asks, and lives until the stream has been
        // waited for.
        let outcome = unsafe { planned.launch(&memory, stream, LIMIT, &mut || false) };
        let result = match outcome.expect("launches") {
            normal::DispatchOutcome::Done(result) => result,
            normal::DispatchOutcome::Rest(rest) => {
                asked.workspaces.push(*rest.workspace());
                asked.rows.push(rest.num_rows());
                memory = self.memory(rest.workspace(), rest.num_rows());
                // SAFETY: as above.
                unsafe { rest.receive(plan, &memory, stream) }.expect("a receive")
            }
        };
        let (rows, stride) = match &result.view {
            Some(view) => (view.rows, view.stride),
            None => (memory.rows, 2 * HIDDEN),
        };
        let bytes: Vec<u8> = self.gpu.download(rows, result.row_layout.num_rows() * stride);
        let marks = bytes.chunks(stride).map(|row| row[0]).collect();
        self.group.check().expect("it ends well");
        DispatchRun { result, asked, marks }
    }

    /// The marks of all tokens of all ranks.
    fn all_marks(&self) -> Vec<u8> {
        (0..self.ranks).flat_map(|rank| (0..TOKENS).map(move |t| (rank * 16 + t) as u8)).collect()
    }
}

fn of_tokens(tokens: usize) -> normal::RowLayout {
    normal::RowLayout::by_token(tokens)
}

/// Each way of a plan: without an estimate, with a large one and a small one, with a given number
/// of rows, with a handle, and with a view.
pub(crate) fn ways_of_a_plan(count: usize) {
    world(count, |ranks, me| {
        let gpu = Gpu::new();
        let rank = Rank::join(ranks, me, count, &gpu);
        let (plan, all) = (rank.plan(false, true), rank.all_marks());
        ranks.meet();
        let first = rank.dispatch(&plan, rank.choosing());
        assert!(first.asked.waits && first.asked.rows == [None, Some(all.len())]);
        let estimate = plan.estimate().expect("a call teaches the plan");
        assert!(estimate.tokens >= all.len() && first.result.next_workspace.is_some());
        let again = rank.dispatch(&plan, rank.choosing());
        assert!(again.asked.waits && again.asked.rows == [Some(estimate.tokens)]);
        assert_eq!(Some(again.asked.workspaces[0]), first.result.next_workspace);
        plan.set_estimate(Some(of_tokens(all.len() - 1)));
        let small = rank.dispatch(&plan, rank.choosing());
        assert_eq!(small.asked.rows, [Some(all.len() - 1), Some(all.len())]);
        assert_eq!(small.asked.workspaces[1].dispatch_scratch, 0, "no second scratch");
        for sent in [&first, &again, &small] {
            let layout = &sent.result.row_layout;
            assert_eq!((layout.tokens, layout.min_combine_rows), (all.len(), all.len()));
            assert_eq!(sent.result.per_expert, Some(vec![all.len() as u32]));
            assert_eq!(sent.marks, all);
        }
        let most = of_tokens(all.len() + 3);
        let given = normal::DispatchRequest { row_layout: Some(most), ..rank.choosing() };
        let given = rank.dispatch(&plan, given);
        assert!(!given.asked.waits && given.asked.rows == [Some(most.tokens)]);
        assert!(given.result.per_expert.is_none() && given.result.next_workspace.is_none());
        assert_eq!(given.marks[..all.len()], all);
        // A handle's rows are known, unless the host has to count them anew.
        let to_rows = rank.plan(false, false);
        for (handle, needs_counts, waits) in [
            (&first.result.handle, true, false),
            (&given.result.handle, false, false),
            (&given.result.handle, true, true),
        ] {
            let cached = rank.request(normal::Routing::Cached(handle));
            let cached = normal::DispatchRequest { needs_counts, ..cached };
            let sent = rank.dispatch(&to_rows, cached);
            assert_eq!(sent.asked.waits, waits);
            assert_eq!(sent.asked.workspaces[0].combine_scratch, 0);
            assert_eq!(sent.marks[..all.len()], all);
        }
        let views = rank.plan(true, true);
        let viewed = normal::DispatchRequest { row_layout: Some(most), ..rank.choosing() };
        let viewed = rank.dispatch(&views, viewed);
        assert!(!viewed.asked.waits && viewed.asked.rows == [None, None]);
        assert!(viewed.result.view.is_some() && viewed.result.handle.row_layout().is_view);
        assert_eq!(viewed.marks[..TOKENS], all[..TOKENS]);
        // A rank with too many tokens makes no call.
        let limited = normal::DispatchRequest { max_tokens: Some(4), ..rank.choosing() };
        let refused = plan.prepare(&rank.group, limited).map(drop);
        assert!(matches!(refused, Err(Error::TooManyTokens(_))), "{refused:?}");
        gpu.stream.synchronize().expect("it ends well");
        ranks.meet();
    });
}
