//! The routing of tokens to ranks, from the experts that each token chose.

use smallvec::SmallVec;

use crate::shared::{
    error::{Error, Result},
    nodes::Nodes,
};

/// The most experts that a token may choose.
pub const MAX_TOP_K: usize = 32;
/// The most experts of a group of ranks.
pub const MAX_EXPERTS: usize = 2048;
/// The most ranks of a node, where tokens are relayed.
pub const MAX_RANKS_OF_NODE: usize = u64::BITS as usize;

/// The experts that each of a rank's tokens chose. A token that repeats an expert goes there once.
#[derive(Clone, Copy, Debug)]
pub struct Choices<'a> {
    /// `tokens * top_k` numbers of experts, row by row; a negative number is no choice.
    pub experts: &'a [i32],
    /// Choices of a token.
    pub top_k: usize,
    /// Experts of all ranks together; rank `r` has those from `r * experts / ranks`.
    pub num_experts: usize,
    /// Ranks of the group.
    pub ranks: usize,
}

/// The ranks of a rank's tokens. A token goes once to each rank that has an expert of its choice.
///
/// A token's place at a rank is the number of earlier tokens that go there too, so the order is the
/// same each time, without a sort and without a counter that several threads add to.
#[derive(Clone, Debug)]
pub struct Routing {
    tokens: usize,
    top_k: usize,
    ranks: usize,
    num_experts: usize,
    experts: Vec<i32>,
    /// The tokens for rank `r` are `to[starts[r]..starts[r + 1]]`, ascending.
    starts: Vec<usize>,
    to: Vec<u32>,
    per_expert: Vec<u32>,
    /// By node; none if tokens are not relayed.
    node_tokens: Vec<NodeTokens>,
}

/// The tokens that go to a node.
#[derive(Clone, Default, Debug)]
pub struct NodeTokens {
    /// Their numbers, ascending.
    pub tokens: Vec<u32>,
    /// For each of them: bit `i` if it goes to the node's rank number `i`.
    pub destinations: Vec<u64>,
}

impl Routing {
    /// Computes the routing of choices.
    ///
    /// # Errors
    /// A number is out of its range.
    pub fn new(choices: Choices<'_>) -> Result<Self> {
        let Choices { experts, top_k, num_experts, ranks } = choices;
        if top_k == 0 || top_k > MAX_TOP_K {
            return Err(Error::invalid(format!("top-k is 1 to {MAX_TOP_K}, not {top_k}")));
        }
        if num_experts == 0 || num_experts > MAX_EXPERTS || !num_experts.is_multiple_of(ranks) {
            let why = format!(
                "the number of experts is a multiple of the {ranks} ranks and {MAX_EXPERTS} at most, not {num_experts}"
            );
            return Err(Error::invalid(why));
        }
        let rows = experts.chunks_exact(top_k);
        let mut per_expert = vec![0; num_experts];
        for (token, row) in rows.clone().enumerate() {
            for (k, expert) in row.iter().enumerate() {
                let Ok(expert) = usize::try_from(*expert) else { continue };
                let count = per_expert.get_mut(expert).ok_or_else(|| {
                    Error::invalid(format!("token {token} chose expert {expert} of {num_experts}"))
                })?;
                *count += u32::from(first_of(row, k) == k);
            }
        }
        let local = num_experts / ranks;
        let tokens = rows.len();
        let (starts, to) = tokens_by_rank(ranks, tokens, |token, goes_to| {
            let owners = experts[token * top_k..][..top_k].iter();
            let owners = owners.filter_map(|choice| owner_of(*choice, local).map(|(rank, _)| rank));
            let mut seen = SmallVec::<[usize; MAX_TOP_K]>::new();
            for rank in owners {
                if !seen.contains(&rank) {
                    seen.push(rank);
                    goes_to(rank);
                }
            }
        });
        let experts = experts[..tokens * top_k].to_vec();
        let node_tokens = Vec::new();
        Ok(Self { tokens, top_k, ranks, num_experts, experts, starts, to, per_expert, node_tokens })
    }

    /// The routing of tokens without choices: `token_in_rank[token * ranks + rank]`. `per_expert`
    /// has, for each expert of all ranks, the token count that its rank will get.
    ///
    /// # Errors
    /// The number of experts is no multiple of the ranks.
    pub fn by_rank(token_in_rank: &[bool], per_expert: &[u32], ranks: usize) -> Result<Self> {
        let num_experts = per_expert.len();
        if num_experts > MAX_EXPERTS || !num_experts.is_multiple_of(ranks) {
            return Err(Error::invalid(format!("{num_experts} experts for {ranks} ranks")));
        }
        let tokens = token_in_rank.len() / ranks;
        let (starts, to) = tokens_by_rank(ranks, tokens, |token, goes_to| {
            let is_in_rank = token_in_rank[token * ranks..][..ranks].iter().enumerate();
            is_in_rank.filter(|(_, is_in)| **is_in).for_each(|(rank, _)| goes_to(rank));
        });
        let (experts, per_expert, node_tokens) = (Vec::new(), per_expert.to_vec(), Vec::new());
        Ok(Self {
            tokens,
            top_k: 0,
            ranks,
            num_experts,
            experts,
            starts,
            to,
            per_expert,
            node_tokens,
        })
    }

    /// The same, with relays: a token goes once to each other node that it needs, to the relay
    /// there.
    ///
    /// # Errors
    /// The nodes have other ranks, or more than [`MAX_RANKS_OF_NODE`] each.
    pub fn relayed(mut self, nodes: Nodes) -> Result<Self> {
        if nodes.all_ranks() != self.ranks || nodes.ranks > MAX_RANKS_OF_NODE {
            return Err(Error::invalid(format!(
                "{} ranks are not relayed on {} nodes with {} ranks each; a node has {MAX_RANKS_OF_NODE} at most",
                self.ranks, nodes.count, nodes.ranks
            )));
        }
        let node_tokens = |node| {
            let mut destinations = vec![0; self.tokens];
            for (local, rank) in nodes.ranks_of(node).enumerate() {
                for token in self.tokens_to(rank) {
                    destinations[*token as usize] |= 1 << local;
                }
            }
            let some = destinations.iter().enumerate().filter(|(_, ranks)| **ranks != 0);
            let (tokens, destinations) = some.map(|(token, ranks)| (token as u32, ranks)).unzip();
            NodeTokens { tokens, destinations }
        };
        self.node_tokens = (0..nodes.count).map(node_tokens).collect();
        Ok(self)
    }

    /// The nodes that tokens are relayed on; one if they are not.
    #[must_use]
    pub fn nodes(&self) -> Nodes {
        let count = self.node_tokens.len().max(1);
        Nodes { count, ranks: self.ranks / count }
    }

    /// The tokens that go to a node, where they are relayed.
    #[must_use]
    pub fn node_tokens(&self, node: usize) -> &NodeTokens {
        &self.node_tokens[node]
    }

    /// The number of tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Choices of a token; none if the ranks were given instead.
    #[must_use]
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// Experts of all ranks together.
    #[must_use]
    pub fn num_experts(&self) -> usize {
        self.num_experts
    }

    /// Experts of each rank.
    #[must_use]
    pub fn local_experts(&self) -> usize {
        self.num_experts / self.ranks
    }

    /// Ranks of the group.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The tokens that go to a rank, ascending.
    #[must_use]
    pub fn tokens_to(&self, rank: usize) -> &[u32] {
        &self.to[self.starts[rank]..self.starts[rank + 1]]
    }

    /// The experts that a token chose.
    #[must_use]
    pub fn choices(&self, token: usize) -> &[i32] {
        &self.experts[token * self.top_k..(token + 1) * self.top_k]
    }

    /// The rank that has the expert of a choice, and the expert's number on this rank.
    #[must_use]
    pub fn owner(&self, choice: i32) -> Option<(usize, usize)> {
        owner_of(choice, self.local_experts())
    }

    /// The last of a token's choices with an expert of a rank.
    #[must_use]
    pub fn last_choice(&self, rank: usize, choices: &[i32]) -> Option<usize> {
        last_choice_of(rank, choices, self.local_experts())
    }

    /// The last of a token's choices with an expert of a node, where tokens are relayed.
    #[must_use]
    pub fn last_choice_of_node(&self, node: usize, choices: &[i32]) -> Option<usize> {
        last_choice_of(node, choices, self.local_experts() * self.nodes().ranks)
    }

    /// The tokens that chose each of a rank's experts.
    #[must_use]
    pub fn per_expert_of(&self, rank: usize) -> &[u32] {
        let local = self.local_experts();
        &self.per_expert[rank * local..(rank + 1) * local]
    }
}

/// The first of a token's choices with the same expert as choice `choice`.
pub(crate) fn first_of(choices: &[i32], choice: usize) -> usize {
    choices[..choice].iter().position(|other| *other == choices[choice]).unwrap_or(choice)
}

fn owner_of(choice: i32, local_experts: usize) -> Option<(usize, usize)> {
    let choice = usize::try_from(choice).ok()?;
    Some((choice / local_experts, choice % local_experts))
}

fn last_choice_of(rank: usize, choices: &[i32], local_experts: usize) -> Option<usize> {
    let is_its =
        |choice: &i32| owner_of(*choice, local_experts).is_some_and(|(its, _)| its == rank);
    choices.iter().rposition(is_its)
}

/// The tokens of each rank, ascending, one rank behind the other. `ranks_of` names the ranks of a
/// token, each once. It is called twice for each token: to count, and to place.
fn tokens_by_rank(
    ranks: usize,
    tokens: usize,
    ranks_of: impl Fn(usize, &mut dyn FnMut(usize)),
) -> (Vec<usize>, Vec<u32>) {
    let mut starts = vec![0; ranks + 1];
    (0..tokens).for_each(|token| ranks_of(token, &mut |rank| starts[rank + 1] += 1));
    for rank in 0..ranks {
        starts[rank + 1] += starts[rank];
    }
    let (mut next, mut to) = (starts.clone(), vec![0; starts[ranks]]);
    for token in 0..tokens {
        ranks_of(token, &mut |rank| {
            to[next[rank]] = token as u32;
            next[rank] += 1;
        });
    }
    (starts, to)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routing(experts: &[i32], top_k: usize) -> Result<Routing> {
        Routing::new(Choices { experts, top_k, num_experts: 6, ranks: 3 })
    }

    #[test]
    fn a_token_goes_once_to_each_rank_that_it_needs() {
        let routing = routing(&[0, 1, -1, 5, 2, 0, -1, -1, -1], 3).unwrap();
        assert_eq!([0, 1, 2].map(|rank| routing.tokens_to(rank)), [&[0, 1][..], &[1], &[1]]);
        assert_eq!([0, 1, 2].map(|rank| routing.per_expert_of(rank)), [[2, 1], [1, 0], [0, 1]]);
        assert_eq!((routing.tokens(), routing.choices(1)), (3, &[5, 2, 0][..]));
    }

    #[test]
    fn a_token_that_names_an_expert_again_is_counted_once() {
        let routing = routing(&[0, 0, 3, 4, 1, 4], 3).unwrap();
        assert_eq!([0, 1, 2].map(|rank| routing.tokens_to(rank)), [&[0, 1][..], &[0], &[1]]);
        assert_eq!([0, 1, 2].map(|rank| routing.per_expert_of(rank)), [[1, 1], [0, 1], [1, 0]]);
        assert_eq!((routing.choices(0), routing.choices(1)), (&[0, 0, 3][..], &[4, 1, 4][..]));
        assert_eq!([0, 1, 2].map(|k| first_of(&[4, 1, 4], k)), [0, 1, 0]);
    }

    #[test]
    fn a_token_goes_once_to_each_node_that_it_needs() {
        let experts = [0, 1, -1, 5, 2, 0, -1, -1, -1, 7, 6, 4];
        let choices = Choices { experts: &experts, top_k: 3, num_experts: 8, ranks: 4 };
        let routing = Routing::new(choices).unwrap().relayed(Nodes { count: 2, ranks: 2 }).unwrap();
        let to = |node| {
            (&routing.node_tokens(node).tokens[..], &routing.node_tokens(node).destinations[..])
        };
        assert_eq!(to(0), (&[0, 1][..], &[0b01, 0b11][..]));
        assert_eq!(to(1), (&[1, 3][..], &[0b01, 0b11][..]));
        assert_eq!(routing.last_choice_of_node(1, routing.choices(1)), Some(0));
        assert_eq!(routing.last_choice_of_node(0, routing.choices(3)), None);
        let why = Routing::new(choices).unwrap().relayed(Nodes { count: 3, ranks: 1 });
        assert!(why.unwrap_err().to_string().contains("4 ranks are not relayed on 3 nodes"));
    }

    #[test]
    fn choices_that_cannot_be_are_named() {
        let why = |experts: &[i32]| routing(experts, 2).unwrap_err().to_string();
        assert_eq!(why(&[0, 1, 2, 6]), "token 1 chose expert 6 of 6");
        assert!(routing(&[], 33).unwrap_err().to_string().contains("not 33"));
        let of = |num_experts, ranks| {
            Routing::new(Choices { experts: &[], top_k: 1, num_experts, ranks })
        };
        assert!(of(7, 3).unwrap_err().to_string().contains("not 7"));
        assert!(of(MAX_EXPERTS, 2).is_ok());
        assert!(of(MAX_EXPERTS + 2, 2).unwrap_err().to_string().contains("2048 at most, not 2050"));
    }

    #[test]
    fn ranks_may_be_given_instead_of_choices() {
        let routing = Routing::by_rank(&[true, false, true, true], &[2, 1], 2).unwrap();
        assert_eq!((routing.tokens_to(0), routing.tokens_to(1)), (&[0, 1][..], &[1][..]));
        assert_eq!((routing.tokens(), routing.per_expert_of(1)), (2, &[1][..]));
        assert!(Routing::by_rank(&[], &[1, 2, 3], 2).is_err());
        assert!(Routing::by_rank(&[], &[0; MAX_EXPERTS], 2).is_ok());
        assert!(Routing::by_rank(&[], &[0; MAX_EXPERTS + 2], 2).is_err());
    }

    #[test]
    fn a_node_has_as_many_ranks_as_a_word_has_bits() {
        let relayed = |ranks: usize| {
            let token_in_rank: Vec<_> =
                (0..2 * ranks).map(|rank| rank % ranks + 1 == ranks).collect();
            Routing::by_rank(&token_in_rank, &[], 2 * ranks)
                .unwrap()
                .relayed(Nodes { count: 2, ranks })
        };
        let routing = relayed(64).unwrap();
        let last = |node| {
            (&routing.node_tokens(node).tokens[..], &routing.node_tokens(node).destinations[..])
        };
        assert_eq!([last(0), last(1)], [(&[0][..], &[1 << 63][..]); 2]);
        let why = relayed(65).unwrap_err().to_string();
        assert!(why.contains("65 ranks each; a node has 64 at most"), "{why}");
    }
}
