//! One sequence: its tokens, its items, and how far the decoder has computed them.
//!
//! Waiting → Running → gone; preemption leads back to Waiting, or to Swapped; abort leads out from anywhere.
//! Blocks and the count of computed tokens live together in a [`DeviceKv`], which only a running sequence has.
//! Preemption takes it away, and the blocks with it.
//!
//! A sequence has one *branch*, its tokens. Under beam search it has one for each live beam, all of one length;
//! they run, wait and are preempted together. Sampled completions are sequences of their own from their first
//! token on ([`Sequence::fork`]). The module does not know how tokens are chosen.

mod cross_source;
mod progress;
mod prompt;
mod token_pace;

use crate::blocks::{KvTables, OutOfBlocks, TableBlocks, blocks_for};
use crate::cross::{CrossCache, CrossKey, CrossShare};
use crate::items::ItemTable;
use crate::prefix::BlockParts;
use crate::request::{SequenceId, SequenceRequest};
use crate::states::{StateMove, StatePool, StateSlot};
use cross_source::{CrossView, views};
pub use progress::{Milestones, SequenceCounters};
use prompt::SharedPrompt;
pub(crate) use prompt::SpanRows;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use token_pace::TokenPace;
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_core::{AdapterId, EncoderOutput, Failure, PrefixKey, TenantId};

/// Order of a sequence in the queue: by request, then by completion. Never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueueKey {
    /// Number of the request.
    pub(crate) request: u64,
    /// Number of the completion.
    pub(crate) completion: u32,
}

/// KV blocks of a running sequence.
#[derive(Debug)]
pub struct DeviceKv {
    /// One for each branch.
    pub branches: Vec<BranchKv>,
    /// Tokens for which it was admitted, a multiple of a block's: it prefills no others.
    pub n_admitted: usize,
    /// Shares of the cross-attention blocks, one for each source; none without cross-attention. Until all are filled, no token
    /// is computed.
    pub cross: Vec<CrossShare>,
    /// Slots of recurrent states for branches that are yet to come; empty for a model without such states.
    pub spare_states: Vec<StateSlot>,
}

/// KV blocks of one branch, on the device or on the host.
#[derive(Debug)]
pub struct BranchKv {
    /// Self-attention blocks: on the device for all tokens so far, on the host for the computed ones. Where there is a window, on
    /// the device for those of the next chunk of a prefill and behind it as far as it sees.
    pub tables: KvTables,
    /// Tokens whose keys and values are in the blocks.
    pub n_computed: usize,
    /// Slot of the recurrent state after the computed tokens; `None` for a model without such states, and on the host.
    pub state: Option<StateSlot>,
}

/// Scheduling state.
#[derive(Debug)]
pub enum SequenceStatus {
    /// Queued, without blocks: new, preempted, or before an item that is not loaded.
    Waiting,
    /// Queued, with its KV on the host; one entry for each branch.
    Swapped(Vec<BranchKv>),
    /// On the device: prefilling or decoding.
    Running(DeviceKv),
}

/// The tokens of one branch.
#[derive(Clone, Debug)]
struct Branch {
    /// Prompt, then generated tokens. Only grows, so positions and spans stay valid.
    tokens: Vec<u32>,
    /// Prefix keys of the full blocks of `tokens`, as far as they were asked for.
    keys: Vec<PrefixKey>,
}

/// A sequence of the scheduler's queue.
#[derive(Debug)]
pub struct Sequence {
    /// Ids of its completions, at least one. The first is the id of the sequence.
    pub completions: Vec<SequenceId>,
    /// Owner.
    pub tenant: TenantId,
    /// Smaller runs first.
    pub priority: i32,
    /// Time by which it must have ended.
    pub deadline: Instant,
    /// Times of its events.
    pub milestones: Milestones,
    /// Token counters.
    pub counters: SequenceCounters,
    /// Scheduling state.
    pub status: SequenceStatus,
    /// Readable length at which it gave up its blocks. Unless that grows, it is not admitted again.
    pub blocked_at: Option<usize>,
    /// Token before which a chunk of its prefill ends, so that its recurrent state is kept there: the end of a prefix that others
    /// had. `None`: none.
    pub checkpoint_at: Option<usize>,
    /// Most branches.
    width: usize,
    /// Most tokens of a branch.
    limit: usize,
    /// Fewest tokens it generates, barring failures.
    n_least: usize,
    is_greedy: bool,
    /// First token of the prompt after which logits are still to be read, for the next one's log-probability. `None`: none
    /// are.
    unscored_from: Option<usize>,
    /// Generated tokens that it had before its first one here: those of an answer that is resumed.
    n_resumed: usize,
    /// Time that its tokens were allowed.
    pace: TokenPace,
    /// True if the last token of its only branch is being chosen, and a placeholder.
    has_placeholder: bool,
    prompt: Arc<SharedPrompt>,
    branches: Vec<Branch>,
}

impl Sequence {
    /// A waiting sequence that can grow to `limit` tokens. The request was checked.
    pub fn new(request: &SequenceRequest, limit: usize, items: &mut ItemTable, now: Instant) -> Self {
        let sampling = &request.sampling;
        let prompt = SharedPrompt::new(request, items);
        let written = request.resumed.as_ref().map_or(&[][..], |resumed| &resumed.tokens);
        Self {
            completions: request.ids.clone(),
            tenant: request.tenant,
            priority: request.priority,
            deadline: request.deadline,
            milestones: Milestones { arrived: now, first_step: None, first_token: None },
            counters: SequenceCounters::default(),
            status: SequenceStatus::Waiting,
            blocked_at: None,
            checkpoint_at: None,
            width: sampling.beams.map_or(1, |b| b.width as usize),
            limit,
            n_least: request.least_tokens().min(limit.saturating_sub(prompt.n_tokens)).max(1),
            is_greedy: sampling.beams.is_none() && (sampling.temperature <= 0.0 || sampling.top_k == Some(1)),
            unscored_from: sampling.prompt_logprobs.map(|_| 0),
            n_resumed: written.len(),
            pace: TokenPace::default(),
            has_placeholder: false,
            prompt: Arc::new(prompt),
            branches: vec![Branch {
                tokens: [request.prepared.tokens.as_slice(), written].concat(),
                keys: Vec::new(),
            }],
        }
    }

    /// Id of the sequence: that of its first completion.
    pub fn id(&self) -> SequenceId {
        self.completions[0]
    }

    /// Number of branches.
    pub fn n_branches(&self) -> usize {
        self.branches.len()
    }

    /// Run slots it takes: one for each branch that it may come to have.
    pub fn n_run_slots(&self) -> usize {
        self.width
    }

    /// True for one completion from the first token to the last, without beams.
    pub fn is_single(&self) -> bool {
        self.width == 1 && self.completions.len() == 1
    }

    /// All tokens of a branch.
    pub fn tokens(&self, branch: usize) -> &[u32] {
        &self.branches[branch].tokens
    }

    /// Number of tokens, the same for each branch.
    pub fn n_tokens(&self) -> usize {
        self.branches[0].tokens.len()
    }

    /// Generated tokens of a branch.
    pub fn generated(&self, branch: usize) -> &[u32] {
        &self.branches[branch].tokens[self.prompt.n_tokens..]
    }

    /// Generated tokens of its first branch, without a placeholder.
    pub fn chosen(&self) -> &[u32] {
        let generated = self.generated(0);
        &generated[..generated.len() - usize::from(self.has_placeholder)]
    }

    /// True if its last token is being chosen.
    pub fn has_placeholder(&self) -> bool {
        self.has_placeholder
    }

    /// True if it runs and all its tokens are computed: the step that chooses the next one is under way.
    pub fn awaits_token(&self) -> bool {
        let n_tokens = self.n_tokens();
        self.device_kv().is_some_and(|r| r.branches.iter().all(|b| b.n_computed == n_tokens))
    }

    /// Tokens of the prompt.
    pub fn n_prompt(&self) -> usize {
        self.prompt.n_tokens
    }

    /// True if log-probabilities of its prompt are to be computed: what the prefix cache has would lack them.
    pub fn is_scored(&self) -> bool {
        self.unscored_from.is_some()
    }

    /// Those of tokens that are about to be computed after which logits are to be read. None is given twice.
    pub fn take_scored(&mut self, tokens: &Range<usize>) -> Range<usize> {
        let Some(from) = self.unscored_from else { return tokens.start..tokens.start };
        let last = self.prompt.n_tokens.saturating_sub(1);
        let end = tokens.end.min(last);
        let start = tokens.start.max(from);
        if end < last {
            self.unscored_from = Some(from.max(end));
        } else {
            self.unscored_from = None;
        }
        if start < end { start..end } else { tokens.start..tokens.start }
    }

    /// Token of the prompt at a place that is no item's.
    pub fn prompt_text_token(&self, at: usize) -> Option<u32> {
        let token = self.branches.first()?.tokens.get(at).copied()?;
        (at < self.prompt.n_tokens && !self.prompt.is_of_item(at)).then_some(token)
    }

    /// True if it chooses the most probable token each time, on one branch.
    pub fn is_greedy(&self) -> bool {
        self.is_greedy
    }

    /// Most tokens of a branch.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Tokens for which every branch has blocks.
    pub fn n_room(&self) -> usize {
        let branches = self.device_kv().into_iter().flat_map(|r| &r.branches);
        branches.map(|b| b.tables.n_room()).min().unwrap_or(0)
    }

    /// Tokens up to which it runs as it was admitted; 0 if it does not run.
    pub fn n_admitted(&self) -> usize {
        self.device_kv().map_or(0, |device_kv| device_kv.n_admitted.max(self.n_room()))
    }

    /// Grows the tables of a prefill of one branch for a chunk that ends with token `chunk_end` at the latest. Several branches
    /// have all their blocks: some rely on others to compute them.
    ///
    /// # Errors
    /// [`OutOfBlocks`]; nothing is taken then.
    pub fn grow_prefill(&mut self, chunk_end: usize) -> Result<(), OutOfBlocks> {
        let Some(DeviceKv { branches, n_admitted, .. }) = self.device_kv_mut() else { return Ok(()) };
        match &mut branches[..] {
            [branch] => branch.tables.grow_prefill(*n_admitted, chunk_end),
            _ => Ok(()),
        }
    }

    /// Fewest tokens it generates barring failures, at least 1.
    pub fn n_least(&self) -> usize {
        self.n_least
    }

    /// KV blocks on the device, if it runs.
    pub fn device_kv(&self) -> Option<&DeviceKv> {
        match &self.status {
            SequenceStatus::Running(device_kv) => Some(device_kv),
            SequenceStatus::Waiting | SequenceStatus::Swapped(_) => None,
        }
    }

    /// Mutable form of [`device_kv`](Self::device_kv).
    pub fn device_kv_mut(&mut self) -> Option<&mut DeviceKv> {
        match &mut self.status {
            SequenceStatus::Running(device_kv) => Some(device_kv),
            SequenceStatus::Waiting | SequenceStatus::Swapped(_) => None,
        }
    }

    /// True if it runs, its cross-attention blocks are filled, and all its tokens but the newest are computed.
    pub fn is_decoding(&self) -> bool {
        let all_but_one = self.n_tokens() - 1;
        self.device_kv()
            .is_some_and(|r| r.has_filled_cross() && r.branches.iter().all(|b| b.n_computed == all_but_one))
    }

    /// Its adapter.
    pub fn adapter(&self) -> Option<AdapterId> {
        self.prompt.adapter
    }

    /// Keys of the sources that it cross-attends to, in their order.
    pub fn cross_keys(&self) -> impl Iterator<Item = CrossKey> {
        self.prompt.cross.iter().map(|source| source.key)
    }

    /// Source number and key of what it cross-attends to, if it runs and rows of it are not projected yet.
    pub fn fills(&self) -> impl Iterator<Item = (usize, CrossKey)> {
        let shares = self.device_kv().map_or(&[][..], |device_kv| &device_kv.cross);
        let sources = self.cross_keys().zip(shares).enumerate();
        sources.filter(|(_, (_, share))| !share.is_filled()).map(|(i, (key, _))| (i, key))
    }

    /// Tokens among `tokens` that attend to encoder rows.
    pub(crate) fn cross_views(&self, tokens: &Range<usize>) -> Vec<CrossView> {
        views(&self.prompt.cross, tokens)
    }

    /// Loaded rows of a source from row `start` on, at most `n`: an encoder output, and their range in it. `None` if there are
    /// none, or they are not loaded.
    pub fn cross_rows(
        &self,
        source: usize,
        start: usize,
        n: usize,
    ) -> Option<(&EncoderOutput, Range<usize>)> {
        self.prompt.cross.get(source)?.rows(start, n)
    }

    /// Position of token `i`, (temporal, height, width).
    pub fn position(&self, i: usize) -> [u32; 3] {
        self.prompt.position(i)
    }

    /// The item's span that has tokens before token `end` and from it on.
    pub fn span_across(&self, end: usize) -> Option<Range<usize>> {
        self.prompt.span_across(end)
    }

    /// Tokens that may be computed once the first `n_computed` are: all, or those before the first item that is
    /// not loaded. 0 when its cross-attention input is missing; filled blocks replace the rows.
    ///
    /// # Errors
    /// The failure of an item that it still needs.
    pub fn readable(&self, n_computed: usize, cache: &CrossCache) -> Result<usize, Failure> {
        let needs_rows = |source: usize, key: &CrossKey| match self.device_kv() {
            Some(device_kv) => device_kv.cross.get(source).is_some_and(|share| !share.is_filled()),
            None => !cache.is_ready(key),
        };
        Ok(self.prompt.readable(n_computed, needs_rows)?.min(self.n_tokens()))
    }

    /// True if the rows of an item are here or awaited.
    pub fn reads_items(&self) -> bool {
        self.prompt.reads_items()
    }

    /// True if all its tokens but the newest are computed, so that it reads no rows before it is preempted. Its prompt alone is not
    /// enough: one that is computed again and was admitted with blocks for a part would lose both, for ever.
    pub fn has_read_items(&self) -> bool {
        let all_but_one = self.n_tokens() - 1;
        self.device_kv().is_some_and(|r| r.has_filled_cross()) && self.n_computed() >= all_but_one
    }

    /// Gives the rows of its items back. Forks keep theirs.
    pub fn release_items(&mut self) {
        Arc::make_mut(&mut self.prompt).release_items();
    }

    /// Waits for the rows of its items again.
    pub fn rejoin_items(&mut self, items: &mut ItemTable) {
        Arc::make_mut(&mut self.prompt).rejoin_items(items);
        self.blocked_at = None;
    }

    /// Tokens that every branch has computed.
    pub fn n_computed(&self) -> usize {
        let branches = match &self.status {
            SequenceStatus::Waiting => return 0,
            SequenceStatus::Swapped(branches) => branches,
            SequenceStatus::Running(device_kv) => &device_kv.branches,
        };
        branches.iter().map(|r| r.n_computed).min().unwrap_or(0)
    }

    /// Item rows among tokens `chunk`, of each span that overlaps it. The chunk ends before the first item that is not loaded.
    pub fn item_rows(&self, chunk: &Range<usize>) -> impl Iterator<Item = SpanRows<'_>> {
        self.prompt.item_rows(chunk)
    }

    /// Keys of the full blocks among the first `n_tokens` tokens of a branch.
    pub fn keys(&mut self, branch: usize, n_tokens: usize) -> &[PrefixKey] {
        let n_blocks = n_tokens.min(self.n_tokens()) / KV_BLOCK_TOKENS;
        for block_idx in self.branches[branch].keys.len()..n_blocks {
            let first_token = block_idx * KV_BLOCK_TOKENS;
            let positions = std::array::from_fn(|i| self.position(first_token + i));
            let branch = &mut self.branches[branch];
            let parts = BlockParts {
                first_token,
                tokens: &branch.tokens[first_token..first_token + KV_BLOCK_TOKENS],
                positions: &positions,
                items: &self.prompt.items,
                cross: &self.prompt.cross_inputs,
            };
            let key = parts.key(branch.keys.last().unwrap_or(&self.prompt.root));
            branch.keys.push(key);
        }
        &self.branches[branch].keys[..n_blocks]
    }

    /// Full blocks that all branches begin with, not counting the last token.
    pub fn n_common_blocks(&mut self) -> usize {
        let n_known = self.n_tokens() - 1;
        let first = self.keys(0, n_known).to_vec();
        let agree = |keys: &[PrefixKey]| first.iter().zip(keys).take_while(|(a, b)| a == b).count();
        (1..self.n_branches()).map(|i| agree(self.keys(i, n_known))).min().unwrap_or(first.len())
    }

    /// Marks the tokens of branch `branch` up to `end` as computed, publishes its full blocks, and gives back those that no
    /// later token sees.
    pub fn advance(&mut self, branch: usize, end: usize) {
        self.publish_computed(branch, end);
        if let SequenceStatus::Running(device_kv) = &mut self.status {
            device_kv.branches[branch].tables.release_unseen(end);
        }
    }

    fn publish_computed(&mut self, branch: usize, end: usize) {
        let SequenceStatus::Running(device_kv) = &mut self.status else { return };
        let branch_kv = &mut device_kv.branches[branch];
        let before = branch_kv.n_computed;
        branch_kv.n_computed = end;
        let first = before / KV_BLOCK_TOKENS;
        let last = end / KV_BLOCK_TOKENS;
        if first == last {
            return;
        }
        self.keys(branch, end);
        let SequenceStatus::Running(device_kv) = &self.status else { return };
        for (block_idx, key) in self.branches[branch].keys.iter().enumerate().take(last).skip(first) {
            device_kv.branches[branch].tables.publish(block_idx, *key);
        }
    }

    /// Appends a token to its only branch, or puts it in the place of the placeholder.
    pub fn push(&mut self, token: u32) {
        let tokens = &mut self.branches[0].tokens;
        if std::mem::take(&mut self.has_placeholder) {
            tokens.pop();
        }
        tokens.push(token);
    }

    /// Notes the time of a token that comes next, if it is the first.
    pub fn mark_token(&mut self, now: Instant) {
        self.milestones.first_token.get_or_insert(now);
    }

    /// Times between tokens that its tokens so far are followed by. A token that is being chosen is there before the next.
    fn n_gaps(&self) -> usize {
        self.generated(0).len().saturating_sub(self.n_resumed)
    }

    /// Allows tokens that are new since the last call a stretch of the TPOT SLO each, at least 1.
    pub fn allow(&mut self, stretch: f64) {
        self.pace.allow(self.n_gaps(), stretch);
    }

    /// Time for which its next token may wait before the mean time of its tokens after the first exceeds `target`, stretched as far
    /// as it was for each; zero if it does already. `stretch`: that of tokens that were not [allowed](Self::allow) one. `None`
    /// before its first token.
    pub fn token_slack(&self, target: Duration, stretch: f64, now: Instant) -> Option<Duration> {
        let elapsed = now.saturating_duration_since(self.milestones.first_token?);
        Some(self.pace.time(self.n_gaps(), target, stretch).saturating_sub(elapsed))
    }

    /// True in the first half of the time from its arrival to its deadline.
    pub fn is_early(&self, now: Instant) -> bool {
        let arrived = self.milestones.arrived;
        let allowed = self.deadline.saturating_duration_since(arrived);
        now.saturating_duration_since(arrived) < allowed / 2
    }

    /// Appends a placeholder for the token that is being chosen to its only branch.
    pub fn push_placeholder(&mut self) {
        self.push(0);
        self.has_placeholder = true;
    }

    /// Another sequence of the same tokens and shared blocks, without recurrent state, for the completion `id`.
    pub fn fork(&self, id: SequenceId) -> Self {
        let status = match self.device_kv() {
            None => SequenceStatus::Waiting,
            Some(device_kv) => SequenceStatus::Running(DeviceKv {
                branches: device_kv.branches.iter().map(BranchKv::fork).collect(),
                n_admitted: device_kv.n_admitted,
                cross: device_kv.cross.iter().map(CrossShare::fork).collect(),
                spare_states: Vec::new(),
            }),
        };
        Self {
            completions: vec![id],
            status,
            prompt: Arc::clone(&self.prompt),
            branches: self.branches.clone(),
            ..*self
        }
    }

    /// Gives a fork slots for copies of its recurrent states. Returns the copies; none without such states. `None` if slots are
    /// missing.
    pub fn copy_states_to(&self, fork: &mut Self, states: &StatePool) -> Option<Vec<StateMove>> {
        let mut copies = Vec::new();
        let of = self.device_kv().into_iter().flat_map(|device_kv| &device_kv.branches);
        let to = fork.device_kv_mut().into_iter().flat_map(|device_kv| &mut device_kv.branches);
        for (source, branch) in of.zip(to) {
            let Some(from) = source.state.as_ref().map(StateSlot::index) else { continue };
            let slot = states.take()?;
            copies.push(StateMove::Copy { from, to: slot.index() });
            branch.state = Some(slot);
        }
        Some(copies)
    }

    /// Replaces the branches; each child continues a present branch with a token. Returns the copies of recurrent states that
    /// must come before the next step.
    pub fn branch(&mut self, children: impl IntoIterator<Item = (usize, u32)> + Clone) -> Vec<StateMove> {
        let child = |(parent, token): (usize, u32)| {
            let mut branch = self.branches[parent].clone();
            branch.tokens.push(token);
            branch
        };
        let branches = children.clone().into_iter().map(child).collect();
        self.branches = branches;
        let SequenceStatus::Running(device_kv) = &mut self.status else { return Vec::new() };
        let parents: Vec<usize> = children.into_iter().map(|(parent, _)| parent).collect();
        let forks = parents.iter().map(|parent| device_kv.branches[*parent].fork()).collect();
        let before = std::mem::replace(&mut device_kv.branches, forks);
        device_kv.hand_down_states(before, &parents)
    }
}

impl DeviceKv {
    /// True unless rows of its cross-attention blocks are missing.
    pub fn has_filled_cross(&self) -> bool {
        self.cross.iter().all(CrossShare::is_filled)
    }

    /// Gives the branches, of which number `i` continues `before[parents[i]]`, their recurrent states: the first child of a parent
    /// has its slot, others get copies in spare ones, among them those of parents without children. Returns the copies.
    fn hand_down_states(&mut self, before: Vec<BranchKv>, parents: &[usize]) -> Vec<StateMove> {
        let mut slots: Vec<Option<StateSlot>> = before.into_iter().map(|branch| branch.state).collect();
        let sources: Vec<Option<u32>> =
            slots.iter().map(|slot| slot.as_ref().map(StateSlot::index)).collect();
        for (branch, parent) in self.branches.iter_mut().zip(parents) {
            branch.state = slots[*parent].take();
        }
        self.spare_states.extend(slots.into_iter().flatten());
        let mut copies = Vec::new();
        for (branch, parent) in self.branches.iter_mut().zip(parents).filter(|(b, _)| b.state.is_none()) {
            let Some(from) = sources[*parent] else { continue };
            branch.state = self.spare_states.pop();
            copies.extend(branch.state.as_ref().map(|slot| StateMove::Copy { from, to: slot.index() }));
        }
        copies
    }
}

impl BranchKv {
    /// Blocks with computed contents, of each group.
    pub fn computed_blocks(&self) -> Vec<TableBlocks<'_>> {
        self.tables.first(blocks_for(self.n_computed))
    }

    /// The same blocks; no recurrent state.
    fn fork(&self) -> Self {
        Self { tables: self.tables.fork(), n_computed: self.n_computed, state: None }
    }
}
