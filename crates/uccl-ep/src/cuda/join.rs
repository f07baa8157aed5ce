//! Meetings of ranks with GPUs: they agree on a path, exchange cards, and open all windows.

use std::sync::Arc;

use uccl_device::{Process, cuda::Context};
use uccl_wire::ep_gpu_card::EpGpuCard;

use super::{
    config::{Config, Reach},
    host_windows::HostWindows,
    offer::Offer,
    status::Reports,
    watch::Watch,
    window::Window,
    windows::Windows,
};
use crate::shared::{
    error::{Error, Result},
    join::{Exchange, Position, agree, agree_on_outcome, all_joined},
};

/// A rank before a meeting.
pub(super) struct Candidate {
    pub(super) context: &'static Context,
    pub(super) reports: Arc<Reports>,
    /// This rank's position before.
    pub(super) position: Position,
}

/// The windows in which the ranks have met, not in use yet, and their common position.
pub(super) struct Rendezvous {
    pub(super) windows: Windows,
    pub(super) position: Position,
}

/// Whether all ranks that are there are on one node or have fabric handles, and none uses the host.
/// `is_via_host`: this rank does.
pub(super) fn may_be_direct(
    config: &Config,
    is_via_host: bool,
    exchange: &mut Exchange<'_>,
) -> Result<bool> {
    let offer = match config.reach {
        Reach::ViaHost => Offer::default(),
        _ if is_via_host => Offer::default(),
        _ => Offer::of(config),
    };
    let offers = exchange(offer.to_bytes())?;
    Ok(offer.is_direct_with(offers.iter().flatten().map(Vec::as_slice)))
}

/// Meets in windows in GPU memory. `prepared` is the caller's own, or its failure to prepare. All
/// ranks know of the inner error.
pub(super) fn meet_directly<T>(
    config: &Config,
    prepared: Result<(T, Candidate)>,
    exchange: &mut Exchange<'_>,
) -> Result<Result<(T, Rendezvous)>> {
    let Config { rank, ranks, pool, .. } = *config;
    let prepared = prepared.and_then(|(own, candidate)| {
        let in_fabric = config.reach == Reach::Fabric;
        let flags = config.has_flags();
        let window = Window::new(candidate.context, (rank, ranks), pool, flags, in_fabric)?;
        let card = window.card(ranks, candidate.position)?;
        Ok((own, candidate, window, card))
    });
    // A rank that failed sends no card, so that the others do not wait for it in vain.
    let card = prepared.as_ref().map_or_else(|_| Vec::new(), |(.., card)| card.encode().to_vec());
    let cards = exchange(card)?;
    let mut failed_window = None;
    let met = prepared.and_then(|(own, candidate, mut window, _)| {
        let opened = open_all(config, &mut window, &cards).and_then(|(processes, position)| {
            Ok((Watch::of_processes(processes, &candidate.reports)?, position))
        });
        match opened {
            Ok((watch, position)) => {
                Ok((own, Rendezvous { windows: Windows::Direct(window, watch), position }))
            }
            Err(why) => {
                failed_window = Some(window);
                Err(why)
            }
        }
    });
    let outcome = agree_on_outcome(rank, met, exchange);
    // Other ranks open it until then. If it were gone, that would be their reason.
    drop(failed_window);
    outcome
}

/// Meets in windows in the host's memory: in those of a first group, or of the one that comes after
/// `before`.
pub(super) fn meet_via_host<T>(
    config: &Config,
    prepared: Result<(T, Candidate)>,
    before: Option<&crate::Group>,
    exchange: &mut Exchange<'_>,
) -> Result<(T, Rendezvous)> {
    let (own, candidate) = all_joined(config.rank, prepared, exchange)?;
    let Config { rank, ranks, pool, timeout, masks_late, node, .. } = *config;
    let group = match before {
        Some(before) => before.regroup_for_device(candidate.position.next_call, exchange)?,
        None => {
            let network = config.network.clone();
            let host = crate::Config { rank, ranks, pool, timeout, masks_late, node, network };
            crate::Group::join_for_device(host, exchange)?
        }
    };
    let position = group.position();
    let host_windows = HostWindows::new(group, candidate.context, &candidate.reports);
    let windows = all_joined(rank, host_windows, exchange)?;
    Ok((own, Rendezvous { windows: Windows::ViaHost(Box::new(windows)), position }))
}

/// Opens the windows of all ranks that are there. Returns the processes that can be watched, and
/// the position from which the ranks continue.
fn open_all(
    config: &Config,
    window: &mut Window,
    cards: &[Option<Vec<u8>>],
) -> Result<(Vec<Option<Process>>, Position)> {
    let Config { rank: me, ranks, .. } = *config;
    if cards.len() != ranks {
        return Err(Error::invalid(format!("{} cards for {ranks} ranks", cards.len())));
    }
    let (mut processes, mut positions) = (Vec::new(), Vec::new());
    for (rank, card) in cards.iter().enumerate() {
        let Some(card) = card else {
            processes.push(window.open(None)?);
            continue;
        };
        let card =
            EpGpuCard::decode(card).map_err(|e| Error::invalid(format!("rank {rank}: {e}")))?;
        let facts = [
            ("its rank", u64::from(card.rank), rank as u64),
            ("as the number of ranks", u64::from(card.ranks), ranks as u64),
            (
                "as bytes of marks, which are none where late ranks are left out,",
                u64::from(card.marks),
                window.flags_len() as u64,
            ),
            ("as bytes of the pool", card.pool, window.pool_len() as u64),
        ];
        agree(me, rank, &facts)?;
        processes.push(window.open(Some(&card))?);
        positions.push(Position { generation: card.generation, next_call: card.next_call });
    }
    Ok((processes, Position::after(positions.into_iter())))
}
