//! What a guest can do wrong on a device, by name: one list per device.

/// Declares the faults of a device, each with the name it has in metrics, status and logs, and their counters. The names
/// stay.
macro_rules! faults {
    ($(#[$meta:meta])* pub enum Fault { $($(#[$doc:meta])* $variant:ident => $name:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Fault { $($(#[$doc])* $variant,)* }

        impl Fault {
            /// Every fault, in order of declaration.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Stable name for metrics, status and logs.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }

        /// How often each fault was met. Never reset.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub(super) struct FaultCounts([u64; Fault::ALL.len()]);

        impl Default for FaultCounts {
            fn default() -> Self {
                Self([0; Fault::ALL.len()])
            }
        }

        impl FaultCounts {
            pub(super) fn of(&self, fault: Fault) -> u64 {
                self.0[fault as usize]
            }

            pub(super) fn count(&mut self, fault: Fault) {
                self.0[fault as usize] += 1;
            }
        }

        impl std::fmt::Display for Fault {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

pub(super) use faults;
