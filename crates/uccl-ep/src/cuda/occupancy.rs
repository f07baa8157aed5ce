//! The share of a GPU that each of the ranks on it has.

use uccl_device::cuda::Gpus;

use crate::shared::{
    error::{Error, Phase, Result},
    join::Exchange,
};

/// Multiprocessors that launches leave to other kernels by default. With 129 blocks on Hopper, 128
/// tokens have a block each, beside the block that sends counts. Collectives of NCCL take 16 to 32;
/// leaving these free makes calls of low latency mode 6 to 14 % longer.
pub const RESERVED: u32 = 3;

/// Launches of a rank that may be on its GPU at a time: a hook's, and one of an asynchronous call
/// on the communication stream.
const LAUNCHES: u32 = 2;

/// A rank's share of its GPU, for [`Config`](super::Config). Kernels of ranks on one GPU wait for
/// each other, so all have to fit on it together. Of one rank alone, a launch waits for none that
/// comes later, so its launches need not fit together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Occupancy {
    /// The most blocks of a launch.
    pub blocks: u32,
    /// Whether no other rank is on the GPU.
    pub is_alone: bool,
}

impl Occupancy {
    /// The share of rank `rank`, which is on GPU `device` of this process. Every rank of the group
    /// calls this, and `reserved` multiprocessors of its GPU are left to other kernels.
    ///
    /// # Errors
    /// There is no such GPU. All ranks fail then.
    pub fn agree(
        rank: usize,
        device: u32,
        reserved: u32,
        exchange: &mut Exchange<'_>,
    ) -> Result<Self> {
        let found = Gpus::get().device(device);
        // A rank without a GPU takes part in the exchange, so that the others do not wait for it.
        let uuid = found.as_ref().map_or_else(|_| Vec::new(), |gpu| gpu.uuid().0.to_vec());
        let uuids = exchange(uuid.clone())?;
        let all = found?.multiprocessors();
        let lacks_gpu = |uuid: &Option<Vec<u8>>| uuid.as_ref().is_some_and(Vec::is_empty);
        if let Some(peer) = uuids.iter().position(lacks_gpu) {
            let why = "it has no GPU".to_owned();
            return Err(Error::PeerLost { phase: Phase::Join, rank, peer, why });
        }
        let sharing = uuids.iter().flatten().filter(|other| **other == uuid).count();
        Ok(Self::of(all, reserved, u32::try_from(sharing).unwrap_or(u32::MAX)))
    }

    /// An equal share for each of `sharing` ranks of a GPU with `all` multiprocessors. `reserved`
    /// of these, but at most half, are left to other kernels, which may wait for other GPUs too.
    #[must_use]
    pub fn of(all: u32, reserved: u32, sharing: u32) -> Self {
        let is_alone = sharing <= 1;
        let launches = if is_alone { 1 } else { sharing.saturating_mul(LAUNCHES) };
        Self { blocks: ((all - reserved.min(all / 2)) / launches).max(1), is_alone }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_of_all_ranks_of_a_gpu_fit_on_it_together() {
        let alone = Occupancy::of(132, 3, 1);
        assert_eq!(alone, Occupancy { blocks: 129, is_alone: true });
        // A rank's hook waits beside an asynchronous call of its own for a send of another rank.
        for (all, reserved, sharing) in [(132, 3, 2), (132, 3, 3), (132, 32, 7), (18, 3, 3)] {
            let share = Occupancy::of(all, reserved, sharing);
            assert!(share.blocks * 2 * sharing <= all - reserved, "{share:?}");
            assert!((share.blocks + 1) * 2 * sharing > all - reserved, "{share:?}");
            assert!(!share.is_alone);
        }
    }

    #[test]
    fn a_share_has_a_block_and_half_of_the_gpu_is_never_reserved() {
        let alone = |blocks| Occupancy { blocks, is_alone: true };
        assert_eq!(Occupancy::of(132, u32::MAX, 1), alone(66));
        assert_eq!(Occupancy::of(1, 3, 1), alone(1));
        assert_eq!(Occupancy::of(0, 3, 1), alone(1));
        assert_eq!(Occupancy::of(8, 0, 9), Occupancy { blocks: 1, is_alone: false });
    }
}
