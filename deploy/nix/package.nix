# Culvert as a package of Nix: callPackage ./package.nix { }
{ lib, rustPlatform, installShellFiles }:

rustPlatform.buildRustPackage {
  pname = "culvert";
  version = (lib.importTOML ../../Cargo.toml).workspace.package.version;
  src = lib.cleanSource ../..;
  cargoLock.lockFile = ../../Cargo.lock;
  cargoBuildFlags = [ "--package" "culvert" ];
  # Most of them need namespaces, or tools that are not here.
  doCheck = false;
  nativeBuildInputs = [ installShellFiles ];

  postInstall = ''
    $out/bin/culvert manual --out man
    installManPage man/*
    installShellCompletion --cmd culvert \
      --bash <($out/bin/culvert completions bash) \
      --zsh <($out/bin/culvert completions zsh) \
      --fish <($out/bin/culvert completions fish)
    install -D -m 0644 deploy/systemd/culvert.service $out/lib/systemd/system/culvert.service
    substituteInPlace $out/lib/systemd/system/culvert.service \
      --replace-fail /usr/bin/culvert $out/bin/culvert --replace-fail /usr/share/doc $out/share/doc
    install -D -m 0644 -t $out/share/doc/culvert docs/*.md LICENSE-MIT LICENSE-APACHE
  '';

  meta = {
    description = "Tunnel gateway: UDP flows, IP packets and TCP forwards over QUIC";
    license = with lib.licenses; [ mit asl20 ];
    platforms = [ "x86_64-linux" "aarch64-linux" ];
    mainProgram = "culvert";
  };
}
