//! Enums whose variants have labels: each variant and its label are written once.

/// Declares an enum without fields and derives `COUNT`, `ALL`, `LABELS` and `label()` from it, and
/// [`Labelled`](crate::counts::Labelled), so that something can be counted by its variants ([`Counts`](crate::counts::Counts)). A label is a contract with operators
/// (a metric, the JSON of a command, a line of the log), so it is written out and not made from the variant's name.
///
/// ```text
/// labelled! {
///     /// The state of a door.
///     #[derive(Clone, Copy)]
///     pub enum Door {
///         /// Nobody gets in.
///         Shut => "shut",
///         /// Anybody gets in.
///         Ajar => "ajar",
///     }
/// }
/// (Door::COUNT, Door::LABELS, Door::Ajar.label()) == (2, ["shut", "ajar"], "ajar")
/// ```
#[macro_export]
macro_rules! labelled {
    ($(#[$attribute:meta])* $visible:vis enum $name:ident {
        $($(#[$of_variant:meta])* $variant:ident $(= $number:literal)? => $label:literal,)+
    }) => {
        $(#[$attribute])*
        $visible enum $name { $($(#[$of_variant])* $variant $(= $number)?,)+ }

        impl $name {
            /// The number of variants of the enum.
            $visible const COUNT: usize = Self::LABELS.len();

            /// All variants, each at the index that its discriminant is.
            $visible const ALL: [Self; Self::COUNT] = [$(Self::$variant,)+];

            /// The labels of all variants, in the order of `ALL`.
            $visible const LABELS: [&'static str; [$($label,)+].len()] = [$($label,)+];

            /// The label of this variant in metrics, reports and logs.
            #[must_use]
            $visible const fn label(self) -> &'static str {
                Self::LABELS[self as usize]
            }
        }

        impl $crate::counts::Labelled for $name {
            type Each<T> = [T; $name::COUNT];

            const VARIANTS: &'static [Self] = &Self::ALL;

            fn index(self) -> usize {
                self as usize
            }

            fn label(self) -> &'static str {
                $name::label(self)
            }

            fn each<T>(make: impl FnMut(Self) -> T) -> Self::Each<T> {
                Self::ALL.map(make)
            }
        }

        const _: () = {
            let mut index = 0;
            while index < $name::COUNT {
                assert!($name::ALL[index] as usize == index, "discriminants count from 0");
                index += 1;
            }
        };
    };
}
