"use strict";

// Where and with what figures were measured: the device, versions, the commit and the command line.
page.panel({
  name: "machine",
  title: "Measured on",
  shows: (data) => Boolean(data.machine && Object.keys(data.machine).length),
  draw: (host) => {
    const { element, data } = page;
    const parts = Object.entries(data.machine).flatMap(([name, value]) => [
      element("dt", {}, name.replaceAll("_", " ")),
      element("dd", {}, value),
    ]);
    host.append(element("dl", { class: "machine" }, ...parts));
    return () => {};
  },
});
