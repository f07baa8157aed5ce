//! The shape of a measurement: the numbers of ranks, tokens, channels, choices and experts.

use anyhow::{Result, bail};
use clap::Args;
use serde::{Deserialize, Serialize};

/// Sizes of a layer and of its batch.
#[derive(Args, Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Shape {
    /// Ranks of this host.
    #[arg(long, default_value_t = 2)]
    pub(crate) ranks: usize,
    /// Nodes that the ranks are spread over, as many ranks on each.
    #[arg(long, default_value_t = 1)]
    pub(crate) nodes: usize,
    /// Tokens of each rank.
    #[arg(long, default_value_t = 128)]
    pub(crate) num_tokens: usize,
    /// Channels of a token.
    #[arg(long, default_value_t = 7168)]
    pub(crate) hidden: usize,
    /// Experts that a token chooses.
    #[arg(long, default_value_t = 8)]
    pub(crate) num_topk: usize,
    /// Experts of all ranks together.
    #[arg(long, default_value_t = 288)]
    pub(crate) num_experts: usize,
}

/// Far more than any batch has; products of sizes do not overflow.
const MOST: usize = 1 << 16;

impl Shape {
    pub(crate) fn check(&self) -> Result<()> {
        let Self { ranks, nodes, num_tokens, hidden, num_topk, num_experts } = *self;
        let sizes = [
            ("--ranks", ranks),
            ("--nodes", nodes),
            ("--num-tokens", num_tokens),
            ("--hidden", hidden),
        ];
        for (name, value) in sizes {
            if value == 0 || value > MOST {
                bail!("{name} is 1 to {MOST}, not {value}");
            }
        }
        if !hidden.is_multiple_of(128) {
            bail!("--hidden is a multiple of 128, not {hidden}");
        }
        if !ranks.is_multiple_of(nodes) {
            bail!("--ranks is a multiple of the {nodes} nodes, not {ranks}");
        }
        if !num_experts.is_multiple_of(ranks) {
            bail!("--num-experts is a multiple of the {ranks} ranks, not {num_experts}");
        }
        if num_topk == 0 || num_topk > num_experts {
            bail!("--num-topk is 1 to {num_experts}, the number of experts, not {num_topk}");
        }
        Ok(())
    }

    /// Experts of a rank.
    pub(crate) fn local(&self) -> usize {
        self.num_experts / self.ranks
    }

    /// The most rows that an expert gets.
    pub(crate) fn rows_of_expert(&self) -> usize {
        self.ranks * self.num_tokens
    }

    /// The experts that a rank's tokens choose: for each token, different ones. The same each time.
    pub(crate) fn choices(&self, rank: usize) -> Vec<i32> {
        let mut random = fastrand::Rng::with_seed(rank as u64);
        let mut experts: Vec<_> = (0..self.num_experts as i32).collect();
        let mut choices = Vec::with_capacity(self.num_tokens * self.num_topk);
        for _ in 0..self.num_tokens {
            for k in 0..self.num_topk {
                experts.swap(k, random.usize(k..self.num_experts));
            }
            choices.extend_from_slice(&experts[..self.num_topk]);
        }
        choices
    }

    /// A rank's tokens, in bf16: powers of two, so that sums and FP8 are exact. The same each time.
    pub(crate) fn tokens(&self, rank: usize) -> Vec<u16> {
        const VALUES: [u16; 6] = [0x3f80, 0x4000, 0x4080, 0xbf80, 0xc000, 0xc080];
        let mut random = fastrand::Rng::with_seed(!(rank as u64));
        (0..self.num_tokens * self.hidden).map(|_| VALUES[random.usize(..VALUES.len())]).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const SMALL: Shape =
        Shape { ranks: 2, nodes: 1, num_tokens: 5, hidden: 256, num_topk: 3, num_experts: 6 };

    #[test]
    fn a_token_chooses_different_experts() {
        let choices = SMALL.choices(1);
        assert_eq!(choices, SMALL.choices(1));
        for row in choices.chunks(3) {
            let mut row = row.to_vec();
            row.sort_unstable();
            row.dedup();
            assert!(row.len() == 3 && row.iter().all(|expert| (0..6).contains(expert)), "{row:?}");
        }
    }

    #[test]
    fn sizes_that_cannot_be_are_named() {
        let why = |shape: Shape| shape.check().unwrap_err().to_string();
        assert!(SMALL.check().is_ok());
        assert!(why(Shape { ranks: 0, ..SMALL }).contains("--ranks is 1 to"));
        assert!(why(Shape { ranks: 4, ..SMALL }).contains("multiple of the 4 ranks, not 6"));
        assert!(why(Shape { nodes: 3, ..SMALL }).contains("multiple of the 3 nodes, not 2"));
        assert!(why(Shape { hidden: 200, ..SMALL }).contains("multiple of 128, not 200"));
        assert!(why(Shape { num_topk: 7, ..SMALL }).contains("1 to 6"));
    }
}
