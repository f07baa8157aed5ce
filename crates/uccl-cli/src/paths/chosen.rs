//! The engine's choice of paths, on connections of this host.

use uccl_bench::{ChosenGpuPaths, ChosenPaths, GpuPair, OtherEnd, chosen_gpu_paths, chosen_paths};
use uccl_p2p::{Config, path_elsewhere};

use super::{GpuPaths, Path, Paths};
use crate::gpus::Gpus;

/// The engine's answers; an error says why there is no path.
pub(crate) struct PathChoices {
    pub(crate) same_process: Result<ChosenPaths, String>,
    pub(crate) same_host: Result<ChosenPaths, String>,
    pub(crate) other_host: Result<&'static str, String>,
    /// From the first GPU that this process sees to the last, if it sees any.
    pub(crate) gpu: Option<Result<ChosenGpuPaths, String>>,
}

impl PathChoices {
    /// Connects endpoints of this process, and of another one, and asks for their paths.
    pub(crate) fn ask(config: &Config, gpus: &Gpus) -> Self {
        let ordinals = gpus.visible.first().zip(gpus.visible.last());
        let pair =
            ordinals.map(|(here, there)| GpuPair { here: here.ordinal, there: there.ordinal });
        let why = |error: anyhow::Error| format!("{error:#}");
        Self {
            same_process: chosen_paths(OtherEnd::SameProcess).map_err(why),
            same_host: chosen_paths(OtherEnd::SameHost).map_err(why),
            other_host: path_elsewhere(config).map_err(|error| error.to_string()),
            gpu: pair.map(|pair| chosen_gpu_paths(pair).map_err(why)),
        }
    }
}

impl Paths {
    /// Puts the engine's choice in the place of the expected paths. A reason stays where the
    /// choice is the expected one.
    pub(crate) fn choose(&mut self, chosen: &PathChoices) {
        let PathChoices { same_process, same_host, other_host, gpu } = chosen;
        self.same_process.choose(same_process.as_ref().map(|paths| paths.heap));
        self.same_host.choose(same_host.as_ref().map(|paths| paths.heap));
        self.same_host_alloc.choose(same_host.as_ref().map(|paths| paths.alloc));
        self.other_host.choose(other_host.as_ref().copied());
        if let (Some(paths), Some(gpu)) = (&mut self.gpu, gpu) {
            paths.choose(gpu, other_host);
        }
    }
}

impl GpuPaths {
    fn choose(
        &mut self,
        chosen: &Result<ChosenGpuPaths, String>,
        other_host: &Result<&'static str, String>,
    ) {
        let chosen = chosen.as_ref();
        self.same_host.choose(chosen.map(|paths| paths.gpu));
        self.host_memory.choose(chosen.map(|paths| paths.host.heap));
        self.alloc_memory.choose(chosen.map(|paths| paths.host.alloc));
        self.other_host.choose(other_host.as_ref().copied());
    }
}

impl Path {
    fn choose(&mut self, chosen: Result<&'static str, &String>) {
        match chosen {
            Ok(name) if self.name == Some(name) => {}
            Ok(name) => *self = Self::new(name, reason(name)),
            // The reason for which no path is expected names the part of the machine.
            Err(_) if self.name.is_none() => {}
            Err(why) => *self = Self::none(why),
        }
    }
}

/// The reason for a path that the machine's devices and permissions do not explain.
fn reason(name: &str) -> &'static str {
    match name {
        "owner" => "the peer makes the copy, in its own memory",
        "cma" => "one copy by the kernel",
        "mapped" => "one copy in user space into the peer's memory",
        "shm" => "through a shared ring, two copies",
        "cuda_ipc" => "a GPU copies between the two processes",
        _ => "the engine's choice",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engine_decides_and_a_reason_that_fits_stays() {
        let mut path = Path::new("cma", "one copy");
        path.choose(Ok("cma"));
        assert_eq!(path, Path::new("cma", "one copy"));
        path.choose(Ok("owner"));
        assert_eq!(path.name, Some("owner"));
        path.choose(Err(&"no connection".to_owned()));
        assert_eq!(path, Path::none("no connection"));
        path.choose(Err(&"again".to_owned()));
        assert_eq!(path, Path::none("no connection"));
    }
}
