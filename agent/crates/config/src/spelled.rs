//! Enums whose variants each have one spelling: in the file, where it is shown, and in metrics.

/// A value of an enum, by its spelling.
pub(super) trait Spelled: Copy + 'static {
    const ALL: &'static [Self];

    fn label(self) -> &'static str;
}

/// What the kernel may do where it can, or not at all.
impl Spelled for bool {
    const ALL: &'static [Self] = &[true, false];

    fn label(self) -> &'static str {
        if self { "auto" } else { "off" }
    }
}

/// Declares such an enum, or takes one that has its labels elsewhere.
macro_rules! spelled {
    ($(#[$meta:meta])* $vis:vis enum $name:ident { $($variants:tt)+ }) => {
        base::labelled! {
            $(#[$meta])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            $vis enum $name { $($variants)+ }
        }

        $crate::spelled::spelled!(impl $name);
    };
    (impl $name:ident) => {
        impl $crate::spelled::Spelled for $name {
            const ALL: &'static [Self] = &Self::ALL;

            fn label(self) -> &'static str {
                self.label()
            }
        }
    };
}
pub(super) use spelled;
