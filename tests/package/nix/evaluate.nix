# Evaluates deploy/nix/module.nix without nixpkgs, whose functions that it calls are here in their simplest form. An option or a
# function that is not here ends the evaluation.
{ deploy }:

let
  lib = rec {
    types = { bool = "bool"; package = "package"; };
    mkOption = { type, description, default ? null, defaultText ? null }: { inherit type default description; };
    mkEnableOption = what: { type = types.bool; default = false; description = "Whether to enable ${what}."; };
    mkIf = condition: content: if condition then content else { };
    mkDefault = value: value;
    # One level is enough for a section and its keys.
    recursiveUpdate = left: right: left // right // { identity = left.identity // (right.identity or { }); };
    last = list: builtins.elemAt list (builtins.length list - 1);
    splitString = by: text: builtins.filter builtins.isString (builtins.split by text);
    toInt = builtins.fromJSON;
    importTOML = path: builtins.fromTOML (builtins.readFile path);
    cleanSource = path: "source";
    licenses = { mit = "MIT"; asl20 = "Apache-2.0"; };
  };
  pkgs = {
    formats.toml = { }: { type = "toml"; generate = name: value: { inherit name value; }; };
    callPackage = path: given: import path ({
      inherit lib;
      rustPlatform.buildRustPackage = it: it // { outPath = "/nix/store/culvert-${it.version}"; };
      installShellFiles = "installShellFiles";
    } // given);
  };
  evaluated = given:
    let
      module = import (deploy + "/nix/module.nix") { inherit config lib pkgs; };
      options = builtins.mapAttrs (_: option: option.default) module.options.services.culvert;
      # What the module reads of the system: its own options, and what it has set.
      config = { services.culvert = options // given; inherit (module.config) environment; };
    in
    module.config;
  # Without its path, as which JSON would show all of it.
  plain = package: { inherit (package) pname version meta; };
  shown = config: config // (if config ? systemd then {
    systemd = config.systemd // { packages = map plain config.systemd.packages; };
    environment = config.environment // { systemPackages = map plain config.environment.systemPackages; };
  } else { });
in
{
  off = shown (evaluated { });
  exit = shown (evaluated {
    enable = true;
    openFirewall = true;
    settings = { transport.listen = [ "0.0.0.0:4433" "[::]:4433" ]; tun.address = [ "10.9.0.1/24" ]; };
  });
  entry = shown (evaluated { enable = true; settings.log.format = "json"; });
}
