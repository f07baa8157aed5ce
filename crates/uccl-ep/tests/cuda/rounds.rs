//! Calls of several rounds: ranks with more tokens than the pool has room for.

use std::{num::NonZero, sync::Arc, time::Duration};

use uccl_ep::{
    Error,
    combine::{CombineRows, Order},
    control_len,
    cuda::{self, normal},
    numerics::bf16,
    places::SLOTS,
    record::Record,
};

use super::{Gpu, Ranks, Route, case::SOON, world};

const LIMIT: Duration = Duration::from_secs(60);
/// Wide, because a pool is a number of whole pages.
const HIDDEN: usize = 1024;
/// Each token chooses an expert of its own rank and one of the next rank.
const TOP_K: usize = 2;

/// Dispatches and combines in rounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rounds {
    /// The tokens of each rank.
    pub(crate) tokens: &'static [usize],
    /// The tokens of each rank that the pool has room for.
    pub(crate) room: usize,
    pub(crate) blocks: u32,
    /// The alignment of an expert's rows, for rows by expert.
    pub(crate) by_expert: Option<usize>,
    /// Whether all ranks know the most tokens of any rank, and no host waits.
    pub(crate) is_bounded: bool,
    /// Tokens of a rank that the bound has room for, beside the most of any rank.
    pub(crate) spare: usize,
    pub(crate) route: Route,
    /// Whether late ranks are left out.
    pub(crate) masks_late: bool,
    pub(crate) timeout: Duration,
}

impl Rounds {
    /// The same where a rank is lost.
    pub(crate) fn soon(self) -> Self {
        Self { timeout: SOON, ..self }
    }
}

/// A dispatch's result and memory.
struct RankDispatch {
    result: normal::DispatchResult,
    memory: normal::RecvMemory,
    layout: normal::WorkspaceLayout,
}

/// One rank's end.
struct Rank<'a> {
    case: Rounds,
    me: usize,
    group: Arc<cuda::Group>,
    gpu: &'a Gpu,
    rows: u64,
    choices: cuda::Choices,
}

/// A value of a token, exact in bf16: by rank, token and channel group.
fn value_of(rank: usize, token: usize, channel: usize) -> u16 {
    bf16::from_f32(((rank * 97 + token * 13 + channel % 5) % 128) as f32)
}

impl Rounds {
    fn ranks(&self) -> usize {
        self.tokens.len()
    }

    fn most(&self) -> usize {
        self.tokens.iter().copied().max().unwrap_or(0)
    }

    /// The most tokens of a rank that there is room for.
    fn bound(&self) -> usize {
        self.most() + self.spare
    }

    /// Bytes of a dispatch's place with so many tokens of each rank.
    fn place(&self, tokens: usize) -> usize {
        let record = Record { payload: 2 * HIDDEN, scales: 0, top_k: TOP_K };
        self.ranks() * record.area(1, tokens)
    }

    /// Bytes of the pool. Rows by expert may go back one by one: a row for each choice.
    fn pool(&self) -> usize {
        self.place(self.room) / self.ranks() * self.ranks().max(TOP_K)
    }

    /// The sources of the tokens that a rank receives, in order: of its own, and of the rank
    /// before.
    fn received(&self, me: usize) -> Vec<(usize, usize)> {
        let from = |rank: usize| {
            let comes = rank == me || (rank + 1) % self.ranks() == me;
            (0..if comes { self.tokens[rank] } else { 0 }).map(move |token| (rank, token))
        };
        (0..self.ranks()).flat_map(from).collect()
    }

    /// Runs dispatches and combines, and compares rows, tables and sums with those that must be.
    pub(crate) fn run(self) {
        world(self.ranks(), |ranks, me| {
            let gpu = Gpu::new();
            let rank = self.join(ranks, me, &gpu);
            let (plan, cached) = (rank.plan(true), rank.plan(false));
            ranks.meet();
            if !self.is_bounded {
                // The plan learns from a call without tokens, and has an estimate for the next one.
                let none = cuda::Choices { tokens: 0, ..rank.choices };
                rank.send(&plan, rank.request(normal::Routing::Choices(none)));
                assert_eq!(plan.estimate().is_some(), rank.group.can_fuse(), "{self:?}");
            }
            for _ in 0..2 {
                let handle = rank.dispatch(&plan, rank.request(rank.routing()));
                let handle = Arc::new(handle);
                rank.combine(&handle);
                rank.dispatch(&cached, rank.request(normal::Routing::Cached(&handle)));
                rank.combine(&handle);
                // The host has no counts of the handle, and asks for them.
                let counted = rank.request(normal::Routing::Cached(&handle));
                let counted = normal::DispatchRequest { needs_counts: true, ..counted };
                let sent = rank.send(&cached, counted).result;
                let (arrived, counts) = (self.received(me).len() as u32, sent.per_expert);
                assert_eq!(counts, self.is_bounded.then(|| vec![arrived]), "{self:?}");
            }
            gpu.stream.synchronize().expect("kernels end well");
            rank.group.check().unwrap_or_else(|e| panic!("{self:?}: {e}"));
            ranks.meet();
        });
    }

    /// Asserts that ranks say nothing in rounds for which they have no tokens, and that nobody says
    /// anything to them.
    pub(crate) fn says_nothing_without_tokens(self) {
        world(self.ranks(), |ranks, me| {
            let gpu = Gpu::new();
            let rank = self.join(ranks, me, &gpu);
            let plan = rank.plan(true);
            ranks.meet();
            let handle = Arc::new(rank.dispatch(&plan, rank.request(rank.routing())));
            rank.combine(&handle);
            gpu.stream.synchronize().expect("kernels end well");
            rank.group.check().unwrap_or_else(|e| panic!("{self:?}: {e}"));
            ranks.meet();
            let rounds = self.bound().div_ceil(self.room);
            assert!(2 * rounds < SLOTS, "each call has a word of its own");
            for (from, round) in
                (0..self.ranks()).flat_map(|from| (0..rounds).map(move |nth| (from, nth)))
            {
                let has_tokens = |rank: usize| self.tokens[rank] > round * self.room;
                // The first call has the counts.
                let [dispatch, combine] = [2 + round, 2 + rounds + round];
                for (call, is_said) in [(dispatch, has_tokens(from)), (combine, has_tokens(me))] {
                    let expected = if is_said { (call as u64) << 17 | 1 } else { 0 };
                    let at = format!("{self:?}: call {call} from rank {from} to rank {me}");
                    assert_eq!(rank.arrived(from, call), expected, "{at}");
                }
            }
            ranks.meet();
        });
    }

    /// Asserts that a round with more tokens than were announced is refused.
    pub(crate) fn refuses_more_than_announced(self) {
        world(self.ranks(), |ranks, me| {
            let gpu = Gpu::new();
            let rank = self.join(ranks, me, &gpu);
            let (plan, cached) = (rank.plan(true), rank.plan(false));
            ranks.meet();
            let RankDispatch { result, memory, layout } =
                rank.send(&plan, rank.request(rank.routing()));
            gpu.stream.synchronize().expect("kernels end well");
            ranks.meet();
            gpu.write(memory.workspace + 4 * layout.starts as u64, &vec![0u32; 1 + self.ranks()]);
            ranks.meet();
            rank.send(&cached, rank.request(normal::Routing::Cached(&result.handle)));
            let why = rank.error();
            assert!(why.contains("tokens for this rank") || why.contains("gave up"), "{why}");
            ranks.meet();
        });
    }

    /// Asserts that ranks which do not agree on the most tokens of any rank are told so: the first
    /// has one round, and the others have more tokens.
    pub(crate) fn tells_of_more_tokens(self) {
        world(self.ranks(), |ranks, me| {
            let gpu = Gpu::new();
            let rank = self.join(ranks, me, &gpu);
            let plan = rank.plan(true);
            ranks.meet();
            let request = rank.request(rank.routing());
            let one_round = (me == 0).then_some(self.room);
            let max_tokens = one_round.or(request.max_tokens);
            rank.send(&plan, normal::DispatchRequest { max_tokens, ..request });
            let (why, room, most) = (rank.error(), self.room, self.most());
            let told = format!("has tokens {most}, this rank {room}");
            assert!(why.contains(&told) || (me != 0 && why.contains("gave up")), "{why}");
            ranks.meet();
        });
    }

    /// Asserts that rows of a rank that is lost between the counts and the rounds are zeros. The
    /// last rank is lost.
    pub(crate) fn blanks_rows_of_a_lost_rank(self) {
        world(self.ranks(), |ranks, me| {
            let gpu = Gpu::new();
            let rank = self.join(ranks, me, &gpu);
            let plan = rank.plan(true);
            ranks.meet();
            let request = rank.request(rank.routing());
            let lost = self.ranks() - 1;
            if me == lost {
                let planned = plan.prepare(&rank.group, request).expect("a dispatch");
                let memory = rank.memory(planned.workspace(), None);
                // SAFETY: the memory is as long as the dispatch asks, and lives until the stream
                // has been waited for.
                let counted = unsafe { planned.launch(&memory, &gpu.stream, LIMIT, &mut || false) };
                assert!(matches!(counted, Ok(normal::DispatchOutcome::Rest(_))), "{self:?}");
                ranks.meet();
                return;
            }
            let RankDispatch { result, memory, layout } = rank.send(&plan, request);
            let sources = self.received(me);
            let rows: Vec<u16> = gpu.download(memory.rows, sources.len() * HIDDEN);
            rank.group.check().unwrap_or_else(|e| panic!("{self:?}: {e}"));
            for (row, (from, token)) in rows.chunks(HIDDEN).zip(&sources) {
                let value = |c| if *from == lost { 0 } else { value_of(*from, *token, c) };
                let wanted: Vec<u16> = (0..HIDDEN).map(value).collect();
                assert_eq!(row, wanted, "{self:?}: rank {me}, token {token} of {from}");
            }
            let src_info = memory.workspace + 4 * layout.src_info as u64;
            let tokens: Vec<i32> = gpu.download(src_info, sources.len());
            let source = |(from, token): &(usize, usize)| match *from == lost {
                true => -1,
                false => *token as i32,
            };
            assert_eq!(tokens, sources.iter().map(source).collect::<Vec<_>>(), "{self:?}");
            drop(result);
            ranks.meet();
        });
    }

    /// Asserts that a call whose arguments say of fewer tokens than a rank has is refused.
    pub(crate) fn refuses_more_than_the_call_says(self) {
        world(self.ranks(), |ranks, me| {
            let gpu = Gpu::new();
            let rank = self.join(ranks, me, &gpu);
            let plan = rank.plan(true);
            let (ranks_there, tokens) = (self.ranks(), self.tokens[me]);
            let prepare = |max_tokens, rows: Option<usize>| {
                let row_layout = rows.map(normal::RowLayout::by_token);
                let request = rank.request(rank.routing());
                let request = normal::DispatchRequest { max_tokens, row_layout, ..request };
                plan.prepare(&rank.group, request).map(drop)
            };
            let is_refused = |prepared| {
                assert!(matches!(prepared, Err(Error::TooManyTokens(_))), "{prepared:?}")
            };
            is_refused(prepare(Some(tokens - 1), None));
            is_refused(prepare(None, Some(ranks_there * (tokens - 1))));
            prepare(Some(tokens), None).expect("rounds");
            prepare(None, Some(ranks_there * tokens)).expect("rounds");
            ranks.meet();
        });
    }

    fn join<'a>(&self, ranks: &Ranks, me: usize, gpu: &'a Gpu) -> Rank<'a> {
        let config = cuda::Config {
            rank: me,
            ranks: self.ranks(),
            pool: self.pool(),
            timeout: self.timeout,
            masks_late: self.masks_late,
            device: 0,
            blocks: self.blocks,
            is_alone: self.ranks() == 1,
            reach: cuda::Reach::Any,
            node: None,
            network: None,
        };
        let group = cuda::Group::join(self.route.of(config), &mut ranks.exchange(me));
        let group = group.expect("it joins");
        let is_one_round = self.place(self.most()) <= group.pool_len();
        assert_eq!(is_one_round, self.most() <= self.room, "{self:?}");
        let tokens = self.tokens[me];
        let rows: Vec<u16> = (0..tokens)
            .flat_map(|token| (0..HIDDEN).map(move |channel| value_of(me, token, channel)))
            .collect();
        let next = (me + 1) % self.ranks();
        let experts: Vec<i64> = (0..tokens).flat_map(|_| [me as i64, next as i64]).collect();
        Rank {
            case: *self,
            me,
            group,
            gpu,
            rows: gpu.upload(&rows),
            choices: cuda::Choices {
                experts: gpu.upload(&experts),
                is_64: true,
                tokens,
                top_k: TOP_K,
                num_experts: self.ranks(),
            },
        }
    }
}

impl Rank<'_> {
    /// This rank's word for a rank's data of a call.
    fn arrived(&self, from: usize, call: usize) -> u64 {
        /// Lines of 64 bytes for each rank, and words of flags from each rank in a call.
        const LINES: usize = 3 + SLOTS;
        const FLAGS: usize = 2048 + 1 + 8192;
        let ranks = self.case.ranks();
        let flags = if self.group.can_fuse() { 8 * SLOTS * ranks * FLAGS } else { 0 };
        let window = self.group.pool_address() - (control_len(ranks) + flags) as u64;
        self.gpu.download(window + (64 * LINES * from + 8 * (call % SLOTS)) as u64, 1)[0]
    }

    fn plan(&self, fills_tables: bool) -> normal::Plan {
        normal::Plan::new(normal::PlanShape {
            ranks: self.case.ranks(),
            hidden: HIDDEN,
            row_bytes: 2 * HIDDEN,
            scales: 0,
            top_k: TOP_K,
            num_experts: self.case.ranks(),
            alignment: self.case.by_expert,
            choice_words: 0,
            has_weights: false,
            zero_foreign_weights: false,
            zero_gaps: self.case.by_expert.is_some(),
            fills_tables,
            is_col_major: false,
            zero_copy: false,
            can_fuse: self.group.can_fuse(),
        })
    }

    fn routing(&self) -> normal::Routing<'static> {
        normal::Routing::Choices(self.choices)
    }

    fn request<'b>(&self, routing: normal::Routing<'b>) -> normal::DispatchRequest<'b> {
        let most = self.case.bound();
        let worst = self.case.ranks() * most;
        let rows = normal::RowLayout::upper_bound(worst, self.case.by_expert, TOP_K, 1);
        normal::DispatchRequest {
            input: normal::DispatchInput {
                rows: self.rows,
                stride: 2 * HIDDEN,
                payload: 2 * HIDDEN,
                scales: None,
                weights: 0,
                max_blocks: NonZero::new(self.case.blocks as usize),
            },
            routing,
            row_layout: self.case.is_bounded.then_some(rows),
            max_tokens: self.case.is_bounded.then_some(most),
            needs_counts: !self.case.is_bounded,
        }
    }

    fn memory(&self, layout: &normal::WorkspaceLayout, rows: Option<usize>) -> normal::RecvMemory {
        let workspace = self.gpu.upload(&vec![0xeeee_eeee_u32; layout.len]);
        let rows = rows.map_or(0, |rows| self.gpu.upload(&vec![0xee_u8; rows * 2 * HIDDEN]));
        normal::RecvMemory { workspace, rows, scales: None }
    }

    /// The error of a call, after the end of all enqueued work.
    fn error(&self) -> String {
        self.gpu.stream.synchronize().expect("kernels end");
        self.group.check().map_or_else(|e| e.to_string(), |()| "no error".to_owned())
    }

    /// Sends tokens, and compares nothing.
    fn send(&self, plan: &normal::Plan, request: normal::DispatchRequest<'_>) -> RankDispatch {
        let case = &self.case;
        let planned =
            plan.prepare(&self.group, request).unwrap_or_else(|e| panic!("{case:?}: {e}"));
        let mut memory = self.memory(planned.workspace(), planned.num_rows());
        let mut layout = *planned.workspace();
        let stream = &self.gpu.stream;
        // SAFETY: the memory is as long as the dispatch asks, and lives until the stream has been
        // waited for.
        let outcome = unsafe { planned.launch(&memory, stream, LIMIT, &mut || false) };
        let result = match outcome.unwrap_or_else(|e| panic!("{case:?}: {e}")) {
            normal::DispatchOutcome::Done(result) => result,
            normal::DispatchOutcome::Rest(rest) => {
                layout = *rest.workspace();
                memory = self.memory(&layout, rest.num_rows());
                // SAFETY: as above.
                unsafe { rest.receive(plan, &memory, stream) }.expect("a receive")
            }
        };
        RankDispatch { result, memory, layout }
    }

    fn dispatch(
        &self,
        plan: &normal::Plan,
        request: normal::DispatchRequest<'_>,
    ) -> normal::Handle {
        let case = &self.case;
        let (fills_tables, bounded) = (plan.shape().fills_tables, case.is_bounded);
        let RankDispatch { result, memory, layout } = self.send(plan, request);
        let sources = case.received(self.me);
        if !bounded && fills_tables {
            assert_eq!(result.per_expert, Some(vec![sources.len() as u32]), "{case:?}");
            assert_eq!(result.row_layout.tokens, sources.len(), "{case:?}");
        }
        let rows: Vec<u16> = self.gpu.download(memory.rows, result.row_layout.num_rows() * HIDDEN);
        self.group.check().unwrap_or_else(|e| panic!("{case:?}: {e}"));
        for (row, (rank, token)) in rows.chunks(HIDDEN).zip(&sources) {
            let wanted: Vec<u16> = (0..HIDDEN).map(|c| value_of(*rank, *token, c)).collect();
            assert_eq!(row, wanted, "{case:?}: rank {}, token {token} of {rank}", self.me);
        }
        if fills_tables {
            let at = |words: usize| memory.workspace + 4 * words as u64;
            let tokens: Vec<u32> = self.gpu.download(at(layout.src_info), sources.len());
            let wanted: Vec<u32> = sources.iter().map(|(_, token)| *token as u32).collect();
            assert_eq!(tokens, wanted, "{case:?}: source tokens");
        }
        result.handle
    }

    /// Sends the rows back, which are those of the tokens by order.
    fn combine(&self, handle: &Arc<normal::Handle>) {
        let (case, tokens) = (&self.case, self.case.tokens[self.me]);
        let sent: Vec<u16> = case
            .received(self.me)
            .into_iter()
            .flat_map(|(rank, token)| (0..HIDDEN).map(move |c| value_of(rank, token, c)))
            .collect();
        let len = handle.row_layout().num_rows();
        let mut rows = vec![0x7fc0_u16; len * HIDDEN];
        rows[..sent.len()].copy_from_slice(&sent);
        let input = normal::CombineInput {
            len,
            rows: self.gpu.upload(&rows),
            stride: 2 * HIDDEN,
            hidden: HIDDEN,
            weights: 0,
            sends: if case.by_expert.is_some() {
                CombineRows::EachExpert
            } else {
                CombineRows::Row
            },
            max_blocks: NonZero::new(case.blocks as usize),
        };
        let sums = self.gpu.upload(&vec![0xeeee_u16; tokens * HIDDEN]);
        let bias = vec![bf16::from_f32(1.0); tokens * HIDDEN];
        let output = normal::CombineOutput {
            rows: sums,
            order: if case.by_expert.is_some() { Order::ByChoice } else { Order::ByRank },
            bias: [self.gpu.upload(&bias), 0],
            weights: 0,
        };
        let scratch = self.gpu.upload(&[0xee_u8; cuda::COMBINE_SCRATCH_LEN]);
        let launch = normal::Launch { stream: &self.gpu.stream, scratch };
        // SAFETY: the memory is as long as the arguments state, and lives until the stream has been
        // waited for.
        unsafe {
            let combine = normal::Combine::begin(handle, &input, launch).expect("a combine");
            combine.finish(&output, &self.gpu.stream).expect("sums");
        }
        let sums: Vec<u16> = self.gpu.download(sums, tokens * HIDDEN);
        self.group.check().unwrap_or_else(|e| panic!("{case:?}: {e}"));
        let copies = if case.ranks() == 1 { 1.0 } else { 2.0 };
        for (token, sum) in sums.chunks(HIDDEN).enumerate() {
            let wanted = (0..HIDDEN).map(|channel| {
                let value = bf16::to_f32(value_of(self.me, token, channel));
                bf16::from_f32(copies * value + 1.0)
            });
            assert_eq!(sum, wanted.collect::<Vec<_>>(), "{case:?}: rank {} token {token}", self.me);
        }
    }
}
