// What the search of the built site answers: node tests/site_search.js SITE < queries, a line each. Prints a line of JSON for each
// query: the pages that it lists, best first. The code that ranks them is the site's own, of the theme.

const fs = require("fs");
const path = require("path");
const vm = require("vm");

const site = process.argv[2];
const workers = path.join(site, "assets", "javascripts", "workers");
const [file] = fs.readdirSync(workers).filter((name) => /^search\..*\.js$/.test(name));

let listener;
let answered;
const worker = {
  console,
  addEventListener: (_, given) => (listener = given),
  postMessage: (message) => answered(message),
};
worker.self = worker;
vm.runInNewContext(fs.readFileSync(path.join(workers, file), "utf8"), worker);

const ask = (message) => new Promise((resolve) => ((answered = resolve), listener({ data: message })));

(async () => {
  const index = JSON.parse(fs.readFileSync(path.join(site, "search", "search_index.json"), "utf8"));
  await ask({ type: 0, data: { ...index, options: { suggest: false } } });
  for (const query of fs.readFileSync(0, "utf8").split("\n").filter(Boolean)) {
    const { data } = await ask({ type: 2, data: query });
    console.log(JSON.stringify(data.items.map((sections) => sections[0].location)));
  }
})();
