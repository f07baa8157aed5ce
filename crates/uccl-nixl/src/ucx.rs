//! This plugin as the backend `UCX`, for programs that ask for no other.

use std::{collections::BTreeSet, path::Path};

use parking_lot::Mutex;
use uccl_p2p::Config;

use crate::{
    host, params,
    status::{Error, Result},
};

/// UCX's number of threads that share the transfers. Zero, its default, is none beside the
/// caller's.
const THREADS: &str = "num_threads";
/// Variables of UCX's library by which links and devices are chosen.
const VARIABLES: [&str; 2] = ["UCX_TLS", "UCX_NET_DEVICES"];

/// The settings of an agent that asked for UCX.
///
/// UCX ignores parameters that it does not know, so the settings of this backend are taken, and
/// all others have no effect. The log names them.
pub(crate) fn config(given: &[(&str, &str)]) -> Result<Config> {
    refuse_beside(host::nixl_ep().as_deref())?;
    tracing::info!("UCCL is the backend UCX of this process");
    let (ours, theirs) = split(given);
    let variables = VARIABLES.into_iter().filter(|name| std::env::var_os(name).is_some());
    say_once(theirs.into_iter().chain(variables));
    params::config(ours.into_iter())
}

/// Kernels of `nixl_ep` reach the memory of agents by UCX's own interface for GPUs.
fn refuse_beside(kernels: Option<&Path>) -> Result<()> {
    let Some(library) = kernels else { return Ok(()) };
    Err(Error::Invalid(format!(
        "{} is loaded, and its kernels need UCX itself, not UCCL under UCX's name: \
         unset NIXL_PLUGIN_DIR, or make its folder without --instead-of-ucx; or install \
         uccl-rs-nixl-ep, which brings nixl_ep without UCX",
        library.display()
    )))
}

/// The parameters with an effect here, and the names of the others.
fn split<'a>(given: &[(&'a str, &'a str)]) -> (Vec<(&'a str, &'a str)>, Vec<&'a str>) {
    let known: Vec<_> = Config::names().collect();
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for &(name, value) in given {
        let is_ours = name == THREADS || known.iter().any(|known| known == name);
        match is_ours {
            true if (name, value) == (THREADS, "0") => {}
            true => ours.push((name, value)),
            false if value.is_empty() => {}
            false => theirs.push(name),
        }
    }
    (ours, theirs)
}

fn say_once<'a>(names: impl Iterator<Item = &'a str>) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut new = unsaid(&mut SAID.lock(), names);
    if !new.is_empty() {
        new.sort_unstable();
        let names = new.join(", ");
        tracing::warn!("UCCL is the backend UCX of this process, without effect are: {names}");
    }
}

/// Those that were not said before.
fn unsaid<'a>(said: &mut BTreeSet<String>, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    names.filter(|name| said.insert((*name).to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ucxs_parameters_are_told_from_ours() {
        let given = [
            ("device_list", "mlx5_0"),
            ("engine_config", ""),
            ("num_threads", "4"),
            ("num_workers", "1"),
            ("timeout_ms", "250"),
            ("ucx_error_handling_mode", "peer"),
        ];
        let (ours, theirs) = split(&given);
        assert_eq!(ours, [("num_threads", "4"), ("timeout_ms", "250")]);
        assert_eq!(theirs, ["device_list", "num_workers", "ucx_error_handling_mode"]);
        assert_eq!(split(&[("num_threads", "0")]), (vec![], vec![]));
    }

    #[test]
    fn it_is_refused_beside_the_kernels_of_nixl_ep() {
        assert!(refuse_beside(None).is_ok());
        let refused = refuse_beside(Some(Path::new("/site/nixl_ep_cpp_torch211.so")));
        let refused = refused.expect_err("refused").to_string();
        assert!(refused.contains("nixl_ep_cpp_torch211.so"), "{refused}");
        assert!(refused.contains("uccl-rs-nixl-ep"), "{refused}");
    }

    #[test]
    fn a_name_is_said_once() {
        let mut said = BTreeSet::new();
        assert_eq!(unsaid(&mut said, ["a", "b"].into_iter()), ["a", "b"]);
        assert_eq!(unsaid(&mut said, ["b", "c"].into_iter()), ["c"]);
        assert!(unsaid(&mut said, ["a"].into_iter()).is_empty());
    }

    #[test]
    fn wrong_values_of_our_settings_are_refused() {
        let refused = config(&[("timeout_ms", "soon")]).expect_err("refused").to_string();
        assert!(refused.to_lowercase().contains("timeout_ms"), "{refused}");
        let taken = config(&[("num_threads", "2"), ("ucx_devices", "mlx5_0")]).expect("taken");
        assert_eq!(taken.num_cpus, 2);
    }
}
