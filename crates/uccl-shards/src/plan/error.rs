//! Why there is no plan.

/// Why there is no plan.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A slice of a tensor that there is not.
    #[error("{who} has a slice of tensor {index}, and there are {count} tensors")]
    UnknownTensor {
        /// The rank.
        who: String,
        /// The index of the tensor.
        index: usize,
        /// The number of tensors.
        count: usize,
    },
    /// A slice outside its tensor or its buffer.
    #[error("{who} has a slice of {tensor} that cannot be: {why}")]
    Outside {
        /// The rank.
        who: String,
        /// The tensor.
        tensor: String,
        /// Why not.
        why: String,
    },
    /// Two slices of a target share bytes of memory.
    #[error("{who} has {first} and {second} in the same memory")]
    Overlap {
        /// The rank.
        who: String,
        /// The tensor of one slice.
        first: String,
        /// The tensor of the other slice.
        second: String,
    },
    /// No source has elements that a target needs.
    #[error("no source has {sizes:?} elements of {tensor} at {offsets:?}, which {who} needs")]
    Missing {
        /// The rank.
        who: String,
        /// The tensor.
        tensor: String,
        /// The first of the missing elements, by dimension.
        offsets: Vec<u64>,
        /// The number of them, by dimension.
        sizes: Vec<u64>,
    },
    /// The slices cut a tensor into too many parts.
    #[error("the slices of {tensor} cut it into more than {most} parts")]
    TooManyParts {
        /// The tensor.
        tensor: String,
        /// The most parts.
        most: usize,
    },
    /// Two ranks have different tensors under one name.
    #[error("{name} has {one} at one rank and {other} at another")]
    Different {
        /// The name.
        name: String,
        /// Type and shape at one rank.
        one: String,
        /// Type and shape at another.
        other: String,
    },
}
