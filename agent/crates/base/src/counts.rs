//! One value for each variant of an enum: counts by reason, by kind or by direction.

use std::{
    fmt,
    ops::{AddAssign, Index, IndexMut},
};

/// An enum that [`labelled!`](crate::labelled) declares: its variants have labels and indices.
pub trait Labelled: Copy + 'static {
    /// The array that holds one value for each variant.
    type Each<T>: AsRef<[T]> + AsMut<[T]>;

    /// All variants, each at its index.
    const VARIANTS: &'static [Self];

    /// The place of this variant among [`VARIANTS`](Self::VARIANTS).
    fn index(self) -> usize;

    /// The label of this variant in metrics, reports and logs.
    fn label(self) -> &'static str;

    /// Makes a value for each variant.
    fn each<T>(make: impl FnMut(Self) -> T) -> Self::Each<T>;
}

/// One value for each variant of `K`, found by the variant.
pub struct PerKind<K: Labelled, T>(K::Each<T>);

/// A count for each variant of `K`.
pub type Counts<K> = PerKind<K, u64>;

impl<K: Labelled, T> PerKind<K, T> {
    /// Makes a value for each variant.
    pub fn from_fn(make: impl FnMut(K) -> T) -> Self {
        Self(K::each(make))
    }

    /// Iterates over the variants, each with its value.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (K, &T)> {
        K::VARIANTS.iter().copied().zip(self.0.as_ref())
    }

    /// Each variant with its value, to be changed.
    pub fn iter_mut(&mut self) -> impl ExactSizeIterator<Item = (K, &mut T)> {
        K::VARIANTS.iter().copied().zip(self.0.as_mut())
    }
}

impl<K: Labelled, T: Copy> PerKind<K, T> {
    /// The label of each variant with its value.
    pub fn by_label(&self) -> impl ExactSizeIterator<Item = (&'static str, T)> {
        self.iter().map(|(kind, value)| (kind.label(), *value))
    }
}

impl<K: Labelled> Counts<K> {
    /// The sum of the values of all variants.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.as_ref().iter().sum()
    }
}

impl<K: Labelled, T> Index<K> for PerKind<K, T> {
    type Output = T;

    #[inline]
    fn index(&self, kind: K) -> &T {
        &self.0.as_ref()[kind.index()]
    }
}

impl<K: Labelled, T> IndexMut<K> for PerKind<K, T> {
    #[inline]
    fn index_mut(&mut self, kind: K) -> &mut T {
        &mut self.0.as_mut()[kind.index()]
    }
}

impl<K: Labelled> AddAssign<&Self> for Counts<K> {
    fn add_assign(&mut self, other: &Self) {
        for (sum, count) in self.0.as_mut().iter_mut().zip(other.0.as_ref()) {
            *sum += count;
        }
    }
}

impl<K: Labelled, T: Default> Default for PerKind<K, T> {
    fn default() -> Self {
        Self::from_fn(|_| T::default())
    }
}

impl<K: Labelled, T> Clone for PerKind<K, T>
where
    K::Each<T>: Clone,
{
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<K: Labelled, T> Copy for PerKind<K, T> where K::Each<T>: Copy {}

impl<K: Labelled, T: PartialEq> PartialEq for PerKind<K, T> {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_ref() == other.0.as_ref()
    }
}

impl<K: Labelled, T: Eq> Eq for PerKind<K, T> {}

impl<K: Labelled, T: fmt::Debug> fmt::Debug for PerKind<K, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter().map(|(kind, value)| (kind.label(), value))).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    crate::labelled! {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        enum Fruit {
            Apple => "apple",
            Pear => "pear",
        }
    }

    #[test]
    fn each_variant_has_a_value_and_its_label() {
        let mut counts = Counts::<Fruit>::default();
        counts[Fruit::Pear] += 2;
        assert_eq!(counts.by_label().collect::<Vec<_>>(), [("apple", 0), ("pear", 2)]);
        assert_eq!(counts.iter().find(|(_, count)| **count > 0), Some((Fruit::Pear, &2)));
        let more = Counts::from_fn(|kind| if kind == Fruit::Apple { 7 } else { 1 });
        counts += &more;
        assert_eq!((counts[Fruit::Apple], counts[Fruit::Pear], counts.total()), (7, 3, 10));
        assert_ne!(counts, more);
        assert_eq!(format!("{counts:?}"), r#"{"apple": 7, "pear": 3}"#);
    }
}
