//! Tensors and layouts of ranks, from their manifests.

use std::collections::HashMap;

use super::{manifest::Manifest, shard::ShardEntry};
use crate::plan::{
    Options, Plan, PlanError,
    layout::{Layout, Place, Seat, Slice, Tensor},
    plan,
};

/// Plans for these ranks. Equal lists give equal plans.
pub(crate) fn plan_of(
    sources: &[Manifest],
    targets: &[Manifest],
    options: &Options,
) -> Result<Plan, PlanError> {
    let mut tensors = Tensors::default();
    let sources = tensors.layouts(sources)?;
    let targets = tensors.layouts(targets)?;
    plan(&tensors.list, &sources, &targets, options)
}

/// The tensors of all ranks, by name.
#[derive(Default)]
struct Tensors {
    list: Vec<Tensor>,
    dtypes: Vec<String>,
    indices: HashMap<String, usize>,
}

impl Tensors {
    fn layouts(&mut self, manifests: &[Manifest]) -> Result<Vec<Layout>, PlanError> {
        manifests.iter().map(|manifest| self.layout(manifest)).collect()
    }

    fn layout(&mut self, manifest: &Manifest) -> Result<Layout, PlanError> {
        let slice = |shard: &ShardEntry| {
            let place = Place { buffer: shard.buffer, offset: shard.offset };
            Ok(Slice { tensor: self.index(shard)?, area: shard.area.clone(), place })
        };
        let slices = manifest.shards.iter().map(slice).collect::<Result<_, PlanError>>()?;
        let buffers = manifest.buffers.iter().map(|key| key.0.len).collect();
        let seat = Seat { host: manifest.host.clone(), lanes: manifest.lanes };
        Ok(Layout { buffers, slices, seat })
    }

    fn index(&mut self, shard: &ShardEntry) -> Result<usize, PlanError> {
        if let Some(index) = self.indices.get(&shard.name) {
            let tensor = &self.list[*index];
            let is_same = tensor.shape == shard.shape
                && tensor.element_bytes == shard.element_bytes
                && self.dtypes[*index] == shard.dtype;
            return match is_same {
                true => Ok(*index),
                false => Err(PlanError::Different {
                    name: shard.name.clone(),
                    one: format!("{}{:?}", self.dtypes[*index], tensor.shape),
                    other: format!("{}{:?}", shard.dtype, shard.shape),
                }),
            };
        }
        let index = self.list.len();
        self.indices.insert(shard.name.clone(), index);
        self.dtypes.push(shard.dtype.clone());
        self.list.push(Tensor {
            name: shard.name.clone(),
            shape: shard.shape.clone(),
            element_bytes: shard.element_bytes,
        });
        Ok(index)
    }
}
