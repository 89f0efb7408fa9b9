//! The messages of `docs/culvert.proto` that a client of standard mode needs, encoded and read by hand.

/// A message while it is written: fields in the order of the calls. Zero is written too, which protobuf allows.
#[derive(Clone, Debug, Default)]
pub(crate) struct Message(Vec<u8>);

/// A field as it stands on the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Field {
    Number(u64),
    Bytes(Vec<u8>),
}

impl Message {
    pub(crate) fn number(mut self, field: u64, value: u64) -> Self {
        self.put(field << 3);
        self.put(value);
        self
    }

    pub(crate) fn bytes(mut self, field: u64, value: &[u8]) -> Self {
        self.put(field << 3 | 2);
        self.put(value.len() as u64);
        self.0.extend(value);
        self
    }

    pub(crate) fn encode(self) -> Vec<u8> {
        self.0
    }

    fn put(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push((value & 0x7f) as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

/// The fields of a message with their numbers; `None` if it does not parse.
pub(crate) fn fields(mut rest: &[u8]) -> Option<Vec<(u64, Field)>> {
    let mut fields = Vec::new();
    while !rest.is_empty() {
        let key = take(&mut rest)?;
        let value = take(&mut rest)?;
        let field = match key & 7 {
            0 => Field::Number(value),
            2 => {
                let (bytes, tail) = rest.split_at_checked(usize::try_from(value).ok()?)?;
                rest = tail;
                Field::Bytes(bytes.to_vec())
            }
            _ => return None,
        };
        fields.push((key >> 3, field));
    }
    Some(fields)
}

/// Takes a protobuf integer: seven bits a byte, the lowest first.
fn take(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, tail) = rest.split_first()?;
        *rest = tail;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// `Service`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Service {
    pub(crate) number: u64,
    pub(crate) name: String,
    pub(crate) udp: bool,
    pub(crate) tcp: bool,
    pub(crate) idle_ms: u64,
    pub(crate) fragment: bool,
}

/// `Hello`, without what means nothing to a client of standard mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) protocol_version: u64,
    pub(crate) instance: Vec<u8>,
    pub(crate) max_lanes: u64,
    pub(crate) services: Vec<Service>,
}

/// An `Envelope` from the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Envelope {
    Hello(Hello),
    ServicesChanged(Vec<Service>),
    /// Anything else, by its field number.
    Other(u64),
}

impl Service {
    fn encode(&self) -> Vec<u8> {
        let message = Message::default().number(1, self.number).bytes(2, self.name.as_bytes());
        let message = message.number(3, self.udp.into()).number(4, self.tcp.into()).number(5, self.idle_ms);
        message.number(6, self.fragment.into()).encode()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut service = Self::default();
        for field in fields(bytes)? {
            match field {
                (1, Field::Number(number)) => service.number = number,
                (2, Field::Bytes(name)) => service.name = String::from_utf8(name).ok()?,
                (3, Field::Number(udp)) => service.udp = udp != 0,
                (4, Field::Number(tcp)) => service.tcp = tcp != 0,
                (5, Field::Number(idle)) => service.idle_ms = idle,
                (6, Field::Number(fragment)) => service.fragment = fragment != 0,
                (1..=6, _) => return None,
                _ => (),
            }
        }
        Some(service)
    }
}

impl Hello {
    /// The `Envelope` around it.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut hello = Message::default()
            .number(1, self.protocol_version)
            .bytes(2, &self.instance)
            .bytes(3, b"interop")
            .number(4, 1)
            .number(5, self.max_lanes)
            .number(6, 1200);
        for service in &self.services {
            hello = hello.bytes(7, &service.encode());
        }
        // It takes datagrams in pieces.
        hello = hello.number(8, 4);
        Message::default().bytes(1, &hello.encode()).encode()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut hello =
            Self { protocol_version: 0, instance: Vec::new(), max_lanes: 0, services: Vec::new() };
        for field in fields(bytes)? {
            match field {
                (1, Field::Number(version)) => hello.protocol_version = version,
                (2, Field::Bytes(instance)) => hello.instance = instance,
                (5, Field::Number(lanes)) => hello.max_lanes = lanes,
                (7, Field::Bytes(service)) => hello.services.push(Service::decode(&service)?),
                (1 | 2 | 5 | 7, _) => return None,
                _ => (),
            }
        }
        Some(hello)
    }
}

/// `ServicesChanged` in its `Envelope`.
pub(crate) fn services_changed(services: &[Service]) -> Vec<u8> {
    let list = |list: Message, service: &Service| list.bytes(1, &service.encode());
    let list = services.iter().fold(Message::default(), list);
    Message::default().bytes(6, &list.encode()).encode()
}

impl Envelope {
    /// `None` if it is none.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = fields(bytes)?;
        let (number, field) = fields.pop()?;
        let Field::Bytes(bytes) = field else { return None };
        Some(match number {
            1 => Self::Hello(Hello::decode(&bytes)?),
            6 => {
                let service = |(_, field)| match field {
                    Field::Bytes(service) => Service::decode(&service),
                    Field::Number(_) => None,
                };
                Self::ServicesChanged(self::fields(&bytes)?.into_iter().map(service).collect::<Option<_>>()?)
            }
            other => Self::Other(other),
        })
    }
}

#[test]
fn what_is_written_is_read() {
    let (number, name) = (300, "dns".to_owned());
    let service = Service { number, name, udp: true, tcp: false, idle_ms: 500, fragment: true };
    let services = vec![service, Service { number: 1, name: "x".to_owned(), ..Service::default() }];
    let hello = Hello { protocol_version: 1, instance: vec![7; 16], max_lanes: 0, services };
    assert_eq!(Envelope::decode(&hello.encode()), Some(Envelope::Hello(hello.clone())));
    let changed = Envelope::ServicesChanged(hello.services.clone());
    assert_eq!(Envelope::decode(&services_changed(&hello.services)), Some(changed));
    assert_eq!(Envelope::decode(&[0xff]), None);
}
